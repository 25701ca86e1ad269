"""HDF5 and the data file of one rank enter, findings leave. Pure."""

from mpidp.hdf5.files.library import HDF5Library
from mpidp.tools.doctor.facts import DataFile, RankFacts
from mpidp.tools.doctor.finding import Finding, fail, ok
from mpidp.tools.table import size_text


def check_data(facts: RankFacts) -> list[Finding]:
    """The library, its filters, and the file."""
    findings: list[Finding] = []
    if facts.hdf5 is not None:
        findings += _library(facts.hdf5, facts.environment.get("HDF5_PLUGIN_PATH", ""))
    elif facts.hdf5_error:
        findings.append(
            fail("hdf5", f"h5py cannot be used: {facts.hdf5_error}", "pip install h5py, without another one")
        )
    if facts.file is not None:
        findings += _file(facts.file, facts.hdf5)
    return findings


def _library(hdf5: HDF5Library, plugin_path: str) -> list[Finding]:
    there = [name for name, is_there in hdf5.filters.items() if is_there]
    missing = [name for name, is_there in hdf5.filters.items() if not is_there]
    mpi = "; built with MPI, which mpidp does not need" if hdf5.has_mpi else ""
    more = f"; HDF5_PLUGIN_PATH {plugin_path}" if plugin_path else ""
    findings = [ok("hdf5", f"HDF5 {hdf5.hdf5}, h5py {hdf5.h5py}; filters {', '.join(there)}{mpi}{more}")]
    if missing and not hdf5.packages.get("hdf5plugin"):
        text = f"files with the filters {', '.join(missing)} cannot be read ('required filter is not registered')"
        findings.append(ok("hdf5.filters", f"{text}; where you have such files: pip install hdf5plugin"))
    if not hdf5.packages.get("imagecodecs"):
        findings.append(
            ok("hdf5.codecs", "imagecodecs is not there: chunks are decoded by slower ways; pip install imagecodecs")
        )
    return findings


def _file(file: DataFile, hdf5: HDF5Library | None) -> list[Finding]:
    if file.error:
        return [
            fail(
                "data", f"{file.path}: {file.error}", "give the path as compute nodes see it; a container needs --bind"
            )
        ]
    where = f"{file.kind or 'unknown'} ({'network' if file.is_network else 'this node'})"
    findings = [ok("data", f"{file.path}: {size_text(file.num_bytes)} on {where}, {size_text(file.free_bytes)} free")]
    if file.lock_error:
        findings.append(
            ok(
                "data.locks",
                f"the file system gives no locks ({file.lock_error}); mpidp reads without them. Other programs need "
                "HDF5_USE_FILE_LOCKING=FALSE",
            )
        )
    if hdf5 is not None and hdf5.file_error:
        findings.append(
            fail(
                "data.hdf5",
                f"{file.path}: HDF5 cannot open it: {hdf5.file_error}",
                f"h5ls {file.path}; copy it again if it is truncated; mpidp data verify says more",
            )
        )
    return findings
