"""Names from the run file: built-in, the user's own, and every way in which they can be wrong."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpidp.config import OptimizerSection
from mpidp.errors import ConfigError
from mpidp.train.components import build_optimizer, call, find

BUILT_IN = {"mlp": "mpidp.models.mlp:mlp", "cnn": "mpidp.models.cnn:cnn"}

MODULE = """
import torch
class Models:
    class Net(torch.nn.Module):
        pass
def make(width=3):
    return torch.nn.Linear(width, 1)
number = 7
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, which is not on sys.path, as under a console script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("lookup_"):
            del sys.modules[name]


def test_a_built_in() -> None:
    from mpidp.models.cnn import cnn

    assert find("model.name", "cnn", BUILT_IN) is cnn


@pytest.mark.parametrize(("name", "expected"), [("make", "function"), ("Models.Net", "type")])
def test_the_users_own_from_the_current_folder(here: Path, name: str, expected: str) -> None:
    (here / "lookup_own.py").write_text(MODULE)
    assert type(find("model.name", f"lookup_own:{name}", BUILT_IN)).__name__ == expected


def test_a_package_in_the_current_folder(here: Path) -> None:
    (here / "lookup_package").mkdir()
    (here / "lookup_package" / "net.py").write_text(MODULE)
    assert callable(find("model.name", "lookup_package.net:make", BUILT_IN))


def test_an_installed_module() -> None:
    assert find("model.name", "torch.nn:Linear", {}) is nn.Linear


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cnm", ["'cnm'", "Did you mean 'cnn'?", "mlp", "module:function"]),
        ("resnet", ["'resnet'", "mlp, cnn"]),
        ("lookup_missing:make", ["lookup_missing", "current folder"]),
        ("lookup_own:mak", ["'mak'", "lookup_own", "Did you mean 'make'?"]),
        ("lookup_own:Models.Nett", ["Models.Nett", "Did you mean 'Net'?"]),
        ("lookup_own:number", ["int"]),
        ("lookup_broken:make", ["lookup_broken", "ZeroDivisionError", "division by zero"]),
        ("lookup_syntax:make", ["lookup_syntax", "SyntaxError"]),
        ("lookup_needs:make", ["lookup_needs", "not_installed_anywhere"]),
    ],
)
def test_what_is_wrong_is_named(here: Path, name: str, words: list[str]) -> None:
    (here / "lookup_own.py").write_text(MODULE)
    (here / "lookup_broken.py").write_text("1 / 0")
    (here / "lookup_syntax.py").write_text("def make(:")
    (here / "lookup_needs.py").write_text("import not_installed_anywhere")
    with pytest.raises(ConfigError) as caught:
        find("model.name", name, BUILT_IN)
    text = str(caught.value)
    assert text.startswith("model.name")
    assert all(word in text for word in words), text


def test_calls_with_arguments() -> None:
    assert call("model", nn.Linear, 2, out_features=3).out_features == 3


def takes(width: int, *, depth: int = 1) -> tuple[int, int]:
    return width, depth


@wraps(takes)
def wrapped(*args: Any, **kwargs: Any) -> Any:
    return takes(*args, **kwargs)


@pytest.mark.parametrize("function", [takes, wrapped])
@pytest.mark.parametrize("arguments", [{"widht": 1}, {"width": 1, "dept": 2}, {}])
def test_wrong_arguments_are_named(function: Any, arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        call("model 'own'", function, **arguments)
    text = str(caught.value)
    assert text.startswith("model 'own'")
    assert all(f"{name}={value}" in text for name, value in arguments.items())


def bug_at_once(width: int) -> Any:
    return width + "1"  # type: ignore[operator]


def bug_deeper(width: int) -> Any:
    return bug_at_once(width)


@pytest.mark.parametrize("function", [bug_at_once, bug_deeper])
def test_a_type_error_inside_the_function_is_a_bug_and_keeps_its_traceback(function: Any) -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        call("model 'own'", function, width=1)


@pytest.mark.job
def test_the_console_script_finds_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "own_net.py").write_text("def make(): pass")
    assert looked_up(tmp_path, "own_net:make").stdout == "make\n"


@pytest.mark.job
@pytest.mark.parametrize(("options", "environment"), [(("-P",), {}), ((), {"PYTHONSAFEPATH": "1"})])
def test_not_where_python_is_told_to_be_safe(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    """Behaviour 56."""
    (tmp_path / "own_net.py").write_text("def make(): pass")
    done = looked_up(tmp_path, "own_net:make", *options, **environment)
    assert done.returncode and "not in the current folder (python -P, or PYTHONSAFEPATH is set)" in done.stderr
    assert looked_up(tmp_path, "torch.nn:Linear", *options, **environment).stdout == "Linear\n"


@pytest.mark.job
def test_a_built_in_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    (tmp_path / "mpidp").mkdir()
    (tmp_path / "mpidp/__init__.py").write_text("raise SystemExit('the wrong mpidp')")
    assert looked_up(tmp_path, "cnn").stdout == "cnn\n"


def looked_up(folder: Path, name: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Look a name up in a process of its own, in a folder that is not on sys.path, as under a console script."""
    script = folder / "bin" / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "import sys; from mpidp.train.components import find; from mpidp.models import BUILT_IN;"
        "print(find('model.name', sys.argv[1], BUILT_IN).__name__)"
    )
    words = [sys.executable, *options, str(script), name]
    return subprocess.run(words, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("LBFGS", {}, ["closure", "loop of your own"]),
        (f"{__name__}:Searching", {}, ["Searching", "closure"]),
        ("SparseAdam", {}, ["sparse gradients"]),
        ("Muon", {}, ["2D parameters"]),
        ("SGD", {"momentum": -1}, ["momentum value: -1"]),
    ],
)
def test_optimizers_that_the_loop_cannot_step(name: str, arguments: dict[str, Any], words: list[str]) -> None:
    section = OptimizerSection(name=name, arguments=arguments)
    with pytest.raises(ConfigError) as caught:
        build_optimizer(section, nn.Linear(2, 2))
    assert all(word in str(caught.value) for word in [name, *words]), caught.value


def test_every_other_optimizer_of_torch_can_be_stepped() -> None:
    """Muon takes matrices only."""
    names = [name for name, kind in vars(torch.optim).items() if isinstance(kind, type)]
    for name in sorted(set(names) - {"LBFGS", "SparseAdam", "Optimizer"}):
        model = nn.Linear(2, 2, bias=False)
        optimizer = build_optimizer(OptimizerSection(name=name), model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


class Searching(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)
