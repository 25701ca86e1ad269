"""Nothing that is read from a file is run: no pickles, no evaluation, no shell (Behaviour 56)."""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_states import save, state_of

import mpidp
from mpidp.errors import CheckpointError
from mpidp.train.checkpoint.read import File, Manifest, digest_file, load

PACKAGE = Path(mpidp.__file__).parent
# The copy of an exception that this very process has pickled.
ALLOWED = {("world/collectives.py", "pickle.loads")}
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "marshal.loads", "yaml.load"}


def calls() -> Iterator[tuple[str, str, dict[str, ast.expr]]]:
    """File, function and keyword arguments of every call in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
                yield str(path.relative_to(PACKAGE)), ast.unparse(node.func), keywords


def test_no_call_runs_what_it_reads() -> None:
    found = {(file, name) for file, name, _ in calls() if name in FORBIDDEN}
    assert found == ALLOWED


def test_loading_calls_say_that_they_take_data_only() -> None:
    loads = [(file, name, keywords) for file, name, keywords in calls() if name in ("torch.load", "subprocess.run")]
    assert {name for _, name, _ in loads} == {"torch.load", "subprocess.run"}, "they would be found"
    for file, name, keywords in loads:
        shell, weights_only = (keywords.get(key) for key in ("shell", "weights_only"))
        assert shell is None, file
        assert name != "torch.load" or (isinstance(weights_only, ast.Constant) and weights_only.value is True), file
    assert not [file for file, _, keywords in calls() if "allow_pickle" in keywords and _is_true(keywords)]


def _is_true(keywords: dict[str, ast.expr]) -> bool:
    return not (isinstance(keywords["allow_pickle"], ast.Constant) and keywords["allow_pickle"].value is False)


class Program:
    """What a pickle may hold."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("owned",)


def test_a_checkpoint_with_a_program_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With checksums that fit, as somebody else can make them."""
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1, state_of(1), keep=1)
    torch.save({"model": Program()}, path / "state.pt")
    content = json.loads((path / "manifest.json").read_text())
    files = [File(**file) for file in content["files"]]
    found = File("state.pt", (path / "state.pt").stat().st_size, digest_file(path / "state.pt"))
    files = [found if file.name == "state.pt" else file for file in files]
    (path / "manifest.json").write_text(Manifest(1, 2, content["saved_at"], "sha256", tuple(files)).text())
    with pytest.raises(CheckpointError, match=r"state\.pt holds something else than tensors.*it is not loaded$"):
        load(path)
    assert not Path("owned").exists()
