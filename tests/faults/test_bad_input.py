"""What bad input gets on three ranks: one clear message, exit code 2 or 1, nothing half-written.

Starting ranks is slow, so one job calls the command line once for each case; every rank records what it printed. A few
cases, and those in which ranks differ before MPI can tell them, are jobs of their own.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from tiny import make_workplace, write_data

from jobs import run_job

pytestmark = pytest.mark.timeout(200)
RANKS, TIMEOUT_S = 3, 60.0

DRIVER = """
import contextlib, io, json, sys, traceback
from mpidp.cli import main
import mpidp

rank = mpidp.init().rank
for name, words in json.load(open(sys.argv[1])).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([word.replace("RANK", str(rank)) for word in words])
        except Exception:
            code = None
            traceback.print_exc()
    with open(f"{sys.argv[1]}.{rank}", "a") as file:
        file.write(json.dumps([name, code, out.getvalue() + err.getvalue()]) + "\\n")
"""


@dataclass(frozen=True)
class Case:
    """Words of a command line, the exit code they must get, and what the one message must say."""

    words: list[str]
    code: int
    says: list[str]


def bad(*words: str, code: int = 1, says: list[str]) -> Case:
    return Case(list(words), code, says)


CASES = {
    "missing file": bad("--data.train=gone.h5", says=["gone.h5", "no such file"]),
    "missing second file": bad("--data.train", "data.h5", "gone.h5", says=["gone.h5", "no such file"]),
    "folder": bad("--data.train=.", says=["this is a folder"]),
    "not HDF5": bad("--data.train=run.toml", says=["run.toml", "not an HDF5 file"]),
    "truncated": bad("--data.train=truncated.h5", says=["truncated.h5", "bytes are missing"]),
    "missing dataset": bad("--data.fields", "x", "why", says=["data.h5", '"why"', "y (200,) int64"]),
    "missing validation file": bad(
        *("--data.validation=gone.h5", "--data.validation_fraction=0"), says=["gone.h5", "no such file"]
    ),
    "lengths differ": bad("--data.train=lengths.h5", says=["lengths.h5", '"x" has 9', '"y" has 8']),
    "unsupported dtype": bad("--data.train=strings.h5", says=["strings.h5", '"y"', "string"]),
    "filter": bad("--data.train=filter.h5", says=["filter.h5", "32768", "hdf5plugin"]),
    "empty": bad("--data.train=empty.h5", says=["empty.h5", "no rows"]),
    "split leaves nothing": bad("--data.validation_fraction=0.001", says=["0.001", "200 rows"]),
    "batch larger than the data": bad("--data.global_batch=161", says=["161", "160 samples"]),
    "batch of 0": bad("--data.global_batch=0", code=2, says=["data.global_batch = 0", "at least 1"]),
    "negative batch": bad("--data.global_batch=-3", code=2, says=["data.global_batch = -3", "at least 1"]),
    "unknown key in the file": bad("typo.toml", code=2, says=["typo.toml", "globl_batch", "global_batch"]),
    "run file is no TOML": bad("broken.toml", code=2, says=["broken.toml"]),
    "no run file": bad("gone.toml", code=2, says=["gone.toml"]),
    "unknown option": bad("--data.globl_batch=3", code=2, says=["globl_batch"]),
    "unknown model": bad("--model.name=cnm", code=2, says=["model.name = 'cnm'", "Did you mean 'cnn'?"]),
    "model's module": bad("--model.name=gone:Net", code=2, says=["'gone'", "current folder"]),
    "model's function": bad("--model.name=own:Nett", code=2, says=["own", "Did you mean 'Net'?"]),
    "model's arguments": bad("--model.arguments.widht=3", code=2, says=["own:Net", "widht"]),
    "no module": bad("--model.name=own:no_module", code=2, says=["own:no_module", "int"]),
    "frozen model": bad("--model.name=own:frozen", says=["Net", "no trainable parameter"]),
    "model without parameters": bad("--model.name=own:no_layers", says=["Flatten", "no trainable parameter"]),
    "sparse gradients": bad("--model.name=own:sparse", says=["sparse=True"]),
    "unknown loss": bad("--loss.name=mse", code=2, says=["loss.name = 'mse'", "mse_loss"]),
    "unknown transform": bad("--data.transform=imag", code=2, says=["data.transform = 'imag'", "'image'"]),
    "unknown optimizer": bad("--optimizer.name=AdamV", code=2, says=["optimizer.name = 'AdamV'", "Adam"]),
    "optimizer's arguments": bad("--optimizer.arguments.momentun=1", code=2, says=["momentun"]),
    "optimizer with a closure": bad("LBFGS.toml", code=2, says=["LBFGS", "closure", "loop of your own"]),
    "optimizer of sparse gradients": bad("SparseAdam.toml", code=2, says=["SparseAdam", "sparse"]),
    "optimizer's values": bad("--optimizer.arguments.momentum=-1", code=2, says=["SGD", "momentum value: -1"]),
    "unknown scheduler": bad("--scheduler.name=Step", code=2, says=["scheduler.name = 'Step'", "StepLR"]),
    "unknown end": bad("--train.on_end=own:nothing", code=2, says=["train.on_end", "nothing"]),
    "no place for the run folder": bad("--run.folder=data.h5/runs", code=2, says=["run.folder", "data.h5"]),
    "resume from nothing": bad("--resume=gone", says=["--resume gone", "no run folder there"]),
    "resume from another folder": bad("--resume=other", says=["--resume other", "no run folder there"]),
    "resume without checkpoint": bad("--resume=bare", says=["bare", "no checkpoint"]),
    "resume damaged": bad("--resume=damaged", says=["no usable checkpoint", "step_00000006", "state.pt"]),
    "resume another model": bad("--resume=good", "--model.arguments.width=9", says=["another model", "first.weight"]),
    "resume another optimizer": bad("--resume=good", "--optimizer.name=RMSprop", says=["optimizer SGD", "RMSprop"]),
    "resume other data": bad(
        "--resume=good", "--data.train=more.h5", says=["more.h5", "had 200 rows, and now has 300"]
    ),
    "seeds differ": bad("--run.seed=RANK", says=["seed = 0", "seed = 1", "rank 1"]),
    "resumed runs differ": bad("--resume=good_RANK", says=["good_0", "good_1"]),
    "models differ": bad("--model.name=own:differs", says=["first.weight", "(16, 8)", "(17, 8)", "rank 1"]),
    "model on one rank": bad("--model.name=own:one_rank_cannot", says=["disk of this node is full", "rank 1"]),
    "key on one rank": bad("typo_RANK.toml", code=2, says=["typo_1.toml", "globl_batch", "rank 1"]),
}
MLP = ("--data.train=odd.h5", "--model.name=mlp", "--model.arguments.inputs=9", "--data.fields")
# What only the first steps find: by then there is a run folder.
CASES_OF_STEPS = {
    "bytes": bad(*MLP, "bytes", "y", says=['"bytes" (10, 9) uint8', '[data.field.bytes] dtype = "float32"', "rank 0"]),
    "targets in a column": bad(*MLP, "x", "column", says=['"column" (10, 1) int64', "numpy:ravel", "cross_entropy"]),
    "fractions for classes": bad(*MLP, "x", "fractions", says=['"fractions" (10,) float32', "cross_entropy"]),
    "broadcasting": bad(*MLP, "x", "fractions", "--loss.name=l1_loss", says=["l1_loss", "(10, 10)", "(10,)"]),
    "input of another width": bad(*MLP, "x", "y", "--model.arguments.inputs=3", says=['"x" (10, 9) float32', "10x9"]),
    "one sample for batch norm": bad(
        *("--model.name=own:Net", "--model.arguments.norm=true", "--data.global_batch=79"),
        says=["1 sample to train on in step 3", "drop_last", "global_batch", "train.sync_batch_norm", "rank 0 of 3"],
    ),
    "one sample for batch norm over all ranks": bad(
        *("--model.name=own:Net", "--model.arguments.norm=true"),
        *("--data.global_batch=53", "--train.sync_batch_norm=true"),
        says=["1 on all ranks together", "drop_last"],
    ),
}
CASES |= CASES_OF_STEPS
BUGS = {"model on one rank"}  # an exception of the user's own code keeps its type, and its traceback


def _write_bad_files(folder: Path) -> None:
    write_data(folder / "more.h5", rows=300)
    (folder / "truncated.h5").write_bytes((folder / "data.h5").read_bytes()[:3000])
    columns: dict[str, tuple[Any, Any]] = {
        "lengths": (np.zeros((9, 9)), np.zeros(8)),
        "strings": (np.zeros((8, 9)), np.array([b"cat"] * 8)),
        "empty": (np.zeros((0, 9)), np.zeros(0)),
    }
    for name, (first, second) in columns.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["x"], file["y"] = first, second
    with h5py.File(folder / "filter.h5", "w") as file:
        file["x"] = np.zeros((8, 9))
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4,))
        properties.set_filter(32768, h5py.h5z.FLAG_OPTIONAL, (0,))  # no filter has this number
        h5py.h5d.create(file.id, b"y", h5py.h5t.NATIVE_INT32, h5py.h5s.create_simple((8,)), properties)
    generator = np.random.default_rng(0)
    with h5py.File(folder / "odd.h5", "w") as file:
        file["x"], file["bytes"] = np.ones((200, 9), "f4"), generator.integers(0, 256, (200, 9), "u1")
        file["y"], file["column"] = np.arange(200) % 5, np.arange(200)[:, None] % 5
        file["fractions"] = generator.random(200, "f4")
    run_file = (folder / "run.toml").read_text()
    (folder / "broken.toml").write_text("[data\n")
    for name, text in {"typo": "globl_batch", "typo_0": "global_batch", "typo_1": "globl_batch"}.items():
        (folder / f"{name}.toml").write_text(run_file.replace("global_batch", text))
    for name in ("LBFGS", "SparseAdam"):
        optimizer = f'optimizer = {{name = "{name}"}}  # '
        (folder / f"{name}.toml").write_text(run_file.replace("optimizer =", optimizer))
    shutil.copy(folder / "typo_0.toml", folder / "typo_2.toml")


def _write_run_folders(folder: Path) -> None:
    words = ["-m", "mpidp", "train", "run.toml", "--run.folder=.", "--run.name=good", "--train.epochs=1"]
    result = run_job(words, 0, TIMEOUT_S, cwd=folder)
    assert result.code == 0, result.output
    for name in ("damaged", "good_0", "good_1", "good_2"):
        shutil.copytree(folder / "good", folder / name)
    os.truncate(folder / "damaged/checkpoints/step_00000006/state.pt", 50)
    (folder / "bare" / "checkpoints").mkdir(parents=True)
    (folder / "other").mkdir()


def _words(name: str, case: Case) -> list[str]:
    run_file = ["run.toml"] if case.words[0].startswith("--") else []
    folder = [] if any(word.startswith("--run.folder") for word in case.words) else [f"--run.folder=runs/{name}"]
    return ["train", *run_file, *case.words, *folder]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_workplace(tmp_path_factory.mktemp("bad_input"))
    _write_bad_files(folder)
    _write_run_folders(folder)
    return folder


def _snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    skipped = {"__pycache__"}
    paths = [path for path in folder.rglob("*") if not skipped & set(path.parts) and "cases" not in path.name]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()}


@pytest.fixture(scope="module")
def answers(workplace: Path) -> dict[str, list[tuple[int | None, str]]]:
    """Exit code and output of every rank for each case; a good run at the end shows that the ranks are in step."""
    lines = {name: _words(name, case) for name, case in CASES.items()}
    lines["good at the end"] = ["train", "run.toml", "--run.folder=runs", "--run.name=last", "--train.epochs=1"]
    (workplace / "driver.py").write_text(DRIVER)
    (workplace / "cases").write_text(json.dumps(lines))
    before = _snapshot(workplace)
    result = run_job(["driver.py", "cases"], RANKS, TIMEOUT_S, cwd=workplace)
    assert result.code == 0, result.output
    found: dict[str, list[tuple[int | None, str]]] = {name: [] for name in lines}
    for rank in range(RANKS):
        for line in (workplace / f"cases.{rank}").read_text().splitlines():
            name, code, text = json.loads(line)
            found[name].append((code, text))
    changed = {path for path, state in _snapshot(workplace).items() if before.get(path) != state}
    begun = tuple(str(workplace / "runs" / name) for name in ("last", *CASES_OF_STEPS))
    assert all(path.startswith(begun) for path in changed), f"half-written: {changed}"
    return found


@pytest.mark.parametrize("name", CASES)
def test_one_message_and_the_same_end_on_all_ranks(
    answers: dict[str, list[tuple[int | None, str]]], workplace: Path, name: str
) -> None:
    """Behaviours 29, 33 and the list of bad input."""
    case = CASES[name]
    text = "".join(output for _, output in answers[name])
    assert len(answers[name]) == RANKS
    if name in BUGS:
        assert all(word in text for word in case.says), text
        assert [code for code, _ in answers[name]] == [None] * RANKS
        return
    assert [code for code, _ in answers[name]] == [case.code] * RANKS, text
    assert all(word in text for word in case.says), text
    assert text.count("mpidp: error:") == 1 and "Traceback" not in text, text
    assert name in CASES_OF_STEPS or not (workplace / "runs" / name).exists(), "a run folder was left behind"


def test_after_all_that_a_good_run_works(answers: dict[str, list[tuple[int | None, str]]]) -> None:
    assert [code for code, _ in answers["good at the end"]] == [0] * RANKS


JOBS = ["missing file", "seeds differ", "unknown option", "key on one rank"]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends_with_the_code_and_one_message(workplace: Path, name: str) -> None:
    """Behaviours 29, 36: through the launcher, as users start it."""
    case = CASES[name]
    script = "import os, sys; from mpidp.cli import main\n"
    script += "rank = os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK'))\n"
    script += "sys.exit(main([word.replace('RANK', rank) for word in sys.argv[1:]]))"
    result = run_job(["-c", script, *_words(name, case)], RANKS, TIMEOUT_S, cwd=workplace)
    assert result.code == case.code, result.output
    assert result.output.count("mpidp: error:") == 1 and "Traceback" not in result.output, result.output
    assert all(word in result.output for word in case.says), result.output
    assert not (workplace / "runs" / name).exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("ranks", [0, RANKS])
def test_a_file_that_may_not_be_read(tmp_path: Path, ranks: int) -> None:
    folder = make_workplace(tmp_path)
    (folder / "data.h5").chmod(0)
    result = run_job(["-m", "mpidp", "train", "run.toml"], ranks, TIMEOUT_S, cwd=folder)
    assert result.code == 1 and result.output.count("permission denied") == 1
    assert not (folder / "runs").exists()
