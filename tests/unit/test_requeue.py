"""Which run folder a start continues: the one asked for, the newest, or the one that this Slurm job began."""

import json
from pathlib import Path

import pytest

from mpidp.config import RunConfig, RunSection
from mpidp.train.records.starts import choose_resume, for_array_task, run_folders


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(run=RunSection(name="digits", folder=str(tmp_path)))


def make_run(parent: Path, name: str, job: str | None = None, step: int | None = None) -> Path:
    folder = parent / name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "env.json").write_text(json.dumps([{"slurm_job_id": job}]))
    if step is not None:
        (folder / f"checkpoints/step_{step:08d}").mkdir()
    return folder


def test_without_a_restart_only_what_was_asked(config: RunConfig, tmp_path: Path) -> None:
    make_run(tmp_path, "digits", "7", 10)
    for environment in ({}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}):
        assert choose_resume(config, None, environment) == (None, "")
        assert choose_resume(config, Path("runs/x"), environment) == (Path("runs/x"), "")


def test_a_restarted_job_continues_what_it_began(config: RunConfig, tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    assert choose_resume(config, None, environment)[0] is None
    make_run(tmp_path, "digits", "7")
    folder, why = choose_resume(config, None, environment)
    assert folder is None and "no checkpoint in" in why
    older = make_run(tmp_path, "digits-2", "7", 10)
    make_run(tmp_path, "digits-3", "8", 20)
    make_run(tmp_path, "digits_wide", "7", 20)
    assert choose_resume(config, None, environment)[0] == older
    assert choose_resume(config, Path("runs/x"), environment) == (Path("runs/x"), "")


def test_auto_takes_the_newest_with_a_checkpoint(config: RunConfig, tmp_path: Path) -> None:
    auto = Path("auto")
    folder, why = choose_resume(config, auto, {})
    assert folder is None and "starting from the beginning" in why
    make_run(tmp_path, "digits", step=30)
    second = make_run(tmp_path, "digits-10", step=1)
    (make_run(tmp_path, "digits-11") / "checkpoints/step_00000002_best").mkdir()  # the user's
    assert choose_resume(config, auto, {})[0] == second


def test_run_folders_are_those_of_the_name_newest_first(tmp_path: Path) -> None:
    for name in ("a", "a-2", "a-10", "a-b", "ab", "a_3"):
        (tmp_path / name).mkdir()
    (tmp_path / "a-4").touch()
    assert [path.name for path in run_folders(tmp_path, "a")] == ["a-10", "a-2", "a"]
    assert list(run_folders(tmp_path / "none", "a")) == []


@pytest.mark.parametrize("damage", ["", "[{", "{}", "[]", "[7]", None])
def test_a_lost_record_does_not_let_a_job_begin_anew(config: RunConfig, tmp_path: Path, damage: str | None) -> None:
    """Behaviour 54: what may be this job's is continued, unless something that is for certain is there."""
    environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    folder = make_run(tmp_path, "digits-2", "7", 10)
    make_run(tmp_path, "digits-3", "8", 10)
    if damage is None:
        (folder / "env.json").unlink()
    else:
        (folder / "env.json").write_text(damage)
    assert choose_resume(config, None, environment)[0] == folder
    own = make_run(tmp_path, "digits", "7", 5)
    assert choose_resume(config, None, environment)[0] == own


@pytest.mark.parametrize(
    ("task", "name"), [("", "digits"), ("0", "digits_0"), ("12", "digits_12"), ("²", "digits"), ("../x", "digits")]
)
def test_an_array_task_has_its_number_in_the_name(config: RunConfig, task: str, name: str) -> None:
    assert for_array_task(config, {"SLURM_ARRAY_TASK_ID": task}).run.name == name
