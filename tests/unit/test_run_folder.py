"""Run folders: made new, never overwritten, reopened only if they are one."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mpidp
from mpidp.cli import main
from mpidp.config import DataSection, ModelSection, RunConfig, RunSection, load
from mpidp.errors import CheckpointError, MpidpError
from mpidp.tools.submit import next_folder
from mpidp.train.records.run_folder import RunFolder, _make_new
from mpidp.train.records.starts import AUTO, choose_resume


@pytest.fixture(scope="module")
def world() -> mpidp.World:
    return mpidp.init()


def config_in(folder: Path, name: str = "r") -> RunConfig:
    return RunConfig(
        run=RunSection(name=name, folder=str(folder)),
        data=DataSection(train=("d.h5",)),
        model=ModelSection(name="mlp", arguments={"hidden": [3, 4], "inputs": 2}),
    )


def create(config: RunConfig, world: mpidp.World) -> RunFolder:
    folder = RunFolder.create(config, world)
    folder.close()
    return folder


def test_a_new_folder_says_what_runs_where(tmp_path: Path, world: mpidp.World) -> None:
    config = config_in(tmp_path / "deep" / "runs")
    folder = create(config, world)
    assert folder.path == tmp_path / "deep" / "runs" / "r"
    assert load(folder.path / "config.toml") == config
    (start,) = json.loads((folder.path / "env.json").read_text())
    assert start["ranks"] == 1 and start["nodes"] == 1 and start["hosts"] == [world.host]
    assert start["command"] == sys.argv and start["mpidp"] == mpidp.__version__
    assert start["packages"].keys() == {"torch", "mpi4py", "numpy", "h5py"}
    assert folder.checkpoints.is_dir()
    assert "rank 0 of 1" in (folder.logs / "rank_0000.log").read_text()


def test_folders_that_exist_are_left_alone(tmp_path: Path, world: mpidp.World) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "precious").write_text("mine")
    (tmp_path / "r-2").write_text("even a file")
    assert create(config_in(tmp_path), world).path == tmp_path / "r-3"
    assert create(config_in(tmp_path), world).path == tmp_path / "r-4"
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["precious"]
    assert (tmp_path / "r-2").read_text() == "even a file"


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: _make_new(tmp_path / "runs", "r"), range(32)))
    assert len(set(paths)) == 32


def test_a_second_run_in_one_process_does_not_write_into_the_first_log(tmp_path: Path, world: mpidp.World) -> None:
    first = create(config_in(tmp_path), world)
    before = (first.logs / "rank_0000.log").read_bytes()
    create(config_in(tmp_path), world)
    assert (first.logs / "rank_0000.log").read_bytes() == before


def test_reopening_adds_a_start_and_changes_nothing_else(tmp_path: Path, world: mpidp.World) -> None:
    first = create(config_in(tmp_path), world)
    config = (first.path / "config.toml").read_bytes()
    log = (first.logs / "rank_0000.log").read_text()
    again = RunFolder.hold(first.path, world)
    again.begin(world)
    again.close()
    assert again.path == first.path
    assert (first.path / "config.toml").read_bytes() == config
    assert len(json.loads((first.path / "env.json").read_text())) == 2
    assert (first.logs / "rank_0000.log").read_text().startswith(log)


@pytest.mark.parametrize("there", [False, True])
def test_what_is_no_run_folder_is_not_reopened(tmp_path: Path, world: mpidp.World, there: bool) -> None:
    path = tmp_path / "else"
    if there:
        path.mkdir()
    with pytest.raises(CheckpointError, match=r"else: no run folder there"):
        RunFolder.hold(path, world)
    assert path.exists() == there
    assert not there or not list(path.iterdir()), "nothing half-written"


def test_a_place_where_no_folder_can_be_made_is_named(tmp_path: Path, world: mpidp.World) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MpidpError, match=r"run\.folder.*file"):
        RunFolder.create(config_in(tmp_path / "file" / "runs"), world)


def test_the_home_folder(tmp_path: Path, world: mpidp.World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = create(config_in(Path("~/runs")), world)
    assert folder.path == tmp_path / "runs" / "r"
    assert choose_resume(config_in(Path("~/runs")), AUTO, {})[0] is None
    (folder.checkpoints / "step_00000001").mkdir()
    assert choose_resume(config_in(Path("~/runs")), AUTO, {})[0] == folder.path
    assert next_folder(config_in(Path("~/runs"))) == tmp_path / "runs" / "r-2"


@pytest.mark.parametrize("word", ["~/runs/r", "~/runs", "~"])
def test_commands_know_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the shell has left it, as it does behind an equals sign and in quotes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    seen: list[list[str]] = []
    monkeypatch.setattr("mpidp.cli._dispatch", lambda words: seen.append(words) or 0)
    home = word.replace("~", str(tmp_path))
    assert main(["status", word, f"--output={word}", "--lr=1e-3", f"a{word}", "~no-such-user/x", "-h"]) == 0
    assert seen == [["status", home, f"--output={home}", "--lr=1e-3", f"a{word}", "~no-such-user/x", "-h"]]
