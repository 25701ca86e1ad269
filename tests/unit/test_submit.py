"""`mpidp submit`: the script it writes, word for word, what it refuses, and that it needs neither torch nor MPI."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from login_node import run_without

from mpidp.cli import main
from mpidp.errors import ConfigError
from mpidp.tools.submit import BatchJob, SubmitOptions, next_folder, read_job, render

RECORDED = Path(__file__).parent / "recorded"
SMALL = BatchJob(SubmitOptions(ranks_per_node=4), "digits", ("run.toml",))
LARGE = BatchJob(
    SubmitOptions(
        nodes=4,
        ranks_per_node=4,
        gpus_per_node=4,
        cpus_per_task=8,
        time="4:00:00",
        partition="gpu",
        account="p1",
        qos="long",
        signal_s=300,
        requeue=True,
        mpi="pmix",
        setup=("module load openmpi",),
        sbatch=("--constraint=a100",),
    ),
    "wide net",
    ("run.toml", "--train.epochs=30", "--model.arguments.name=it's"),
    "/opt/my env/bin/python",
)
JOBS = {"small": SMALL, "large": LARGE}


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('run = {name = "digits"}\ndata = {train = "a.h5"}\nmodel = {name = "cnn"}\n')
    return "run.toml"


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_recorded_one(name: str) -> None:
    """Written anew by: python tests/unit/test_submit.py."""
    assert render(JOBS[name]) == (RECORDED / f"submit_{name}.sbatch").read_text()


def test_options_reach_the_job(run_file: str) -> None:
    words = "--nodes 4 --gpus-per-node=2 --time 4:00:00 --partition gpu --requeue --setup A --setup=B --sbatch=--x=1"
    job, config = read_job([run_file, *words.split(), "--train.epochs=3", "--resume", "auto"])
    options = SubmitOptions(
        nodes=4, gpus_per_node=2, time="4:00:00", partition="gpu", requeue=True, setup=("A", "B"), sbatch=("--x=1",)
    )
    assert job == BatchJob(options, "digits", (run_file, "--train.epochs=3", "--resume", "auto"), sys.executable)
    assert (job.ranks_per_node, config.train.epochs) == (2, 3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "how many ranks has a node"),
        ("--ranks-per-node=2 --nodes=0", "--nodes=0; expected"),
        ("--ranks-per-node=2 --time=soon", "--time=soon; expected"),
        (
            "--ranks-per-node=2 --time=3",
            "--signal-s=120 with --time=3: ranks could be told to stop as soon as they start",
        ),
        ("--ranks-per-node=2 --time=1-2 --signal-s=93540", "--signal-s=93540 with --time=1-2: "),
        ("--ranks-per-node=2 --train.epochs=0", "train.epochs = 0"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_queued(run_file: str, words: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_job([run_file, *words.split()])


@pytest.mark.parametrize("words", ["--time=3:01", "--time=3 --signal-s=0", "--time=0", "--time=1-2 --signal-s=93539"])
def test_there_is_time_before_the_signal(run_file: str, words: str) -> None:
    job, _ = read_job([run_file, "--ranks-per-node=2", *words.split()])
    assert ("#SBATCH --signal=USR2@" in render(job)) is (job.options.signal_s > 0)


def test_a_line_break_does_not_end_a_line_of_the_script(run_file: str) -> None:
    with pytest.raises(ConfigError, match="line break"):
        read_job([run_file, "--ranks-per-node=2", "--setup=a\nb"])


def test_without_a_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--nodes=2"]) == 2
    assert "run file first" in capsys.readouterr().err
    assert main(["submit", "absent.toml"]) == 2
    assert "absent.toml: no such file" in capsys.readouterr().err


def test_dry_run_prints_the_script(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", run_file, "--ranks-per-node=4", "--dry-run"]) == 0
    assert capsys.readouterr().out == render(dataclasses.replace(SMALL, python=sys.executable))


def test_without_sbatch(run_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["submit", run_file, "--ranks-per-node=4"]) == 1
    assert "there is no sbatch here" in capsys.readouterr().err


@pytest.mark.job
def test_the_script_is_bash_and_a_login_node_needs_neither_torch_nor_mpi(run_file: str, tmp_path: Path) -> None:
    """Behaviours 40 and 49."""
    words = ["submit", run_file, "--ranks-per-node=4", "--dry-run", "--requeue"]
    done = run_without(("torch", "mpi4py", "h5py", "numpy"), *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


def test_the_next_run_folder(run_file: str, tmp_path: Path) -> None:
    config = read_job([run_file, "--ranks-per-node=1"])[1]
    assert next_folder(config) == Path("runs/digits")
    (tmp_path / "runs/digits").mkdir(parents=True)
    (tmp_path / "runs/digits-2").mkdir()
    assert next_folder(config) == Path("runs/digits-3")


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for name, job in JOBS.items():
        (RECORDED / f"submit_{name}.sbatch").write_text(render(job))
