"""The command line: what it answers, with which exit code, on which rank, and what it must not import."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import mpidp
from mpidp.cli import COMMANDS, Command, main, speaks
from mpidp.config import FieldSection, RunConfig
from mpidp.errors import SHARED_MARK, ConfigError, DataError
from mpidp.options import HelpWanted, parse
from mpidp.tools.data.options import ConvertOptions, VerifyOptions
from mpidp.tools.train import read_options
from mpidp.world import signals

RUN_FILE = """
[data]
train = "digits.h5"
global_batch = 32
[model]
name = "cnn"
[model.arguments]
width = 16
[optimizer.arguments]
betas = [0.9, 0.95]
"""

# The face of `mpidp train`. A change here is a change for every user's scripts: say so in the change log.
TRAIN_OPTIONS = """
--help --resume --dry-run --ranks --print-config
--run.name --run.folder --run.seed
--data.train --data.validation --data.validation_fraction --data.fields --data.global_batch --data.shuffle
--data.streams --data.mixing_chunks --data.mode --data.stage_folder --data.memory_bytes --data.threads
--data.allow_holes --data.drop_last --data.accept_changed --data.transform --data.sample_transform
--model.name --loss.name --optimizer.name --optimizer.lr --optimizer.sharded --scheduler.name
--train.epochs --train.fault_tolerance --train.min_ranks
--train.clip_norm --train.ema_decay --train.micro_batch --train.sync_batch_norm --train.precision --train.threads
--train.on_end --train.early_stopping.metric --train.early_stopping.patience_epochs --train.early_stopping.min_delta
--reduce.reducer --reduce.bucket_bytes --reduce.piece_bytes --reduce.comm_dtype --reduce.error_feedback
--reduce.check_finite --reduce.overlap
--checkpoint.background --checkpoint.best
 --checkpoint.every_epochs --checkpoint.every_steps --checkpoint.keep --checkpoint.on_failure
--log.every_steps --log.progress_s --log.trace_from --log.trace_steps
--watch.stall_warning_s --watch.stall_abort_s --watch.compare_steps
"""

Trained = list[tuple[RunConfig, Path | None]]


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return str(path)


@pytest.fixture
def train_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException | None], Trained]]:
    """Put a trainer in place that records its calls and then raises the given exception."""

    def install(error: BaseException | None) -> Trained:
        calls: Trained = []

        def train(config: RunConfig, resume: Path | None) -> None:
            calls.append((config, resume))
            if error is not None:
                raise error

        module = ModuleType("mpidp.train.trainer")
        module.train = train  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mpidp.train.trainer", module)
        return calls

    yield install
    signals.unwatch()  # a trainer does so at its end


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this process is one rank of four."""
    monkeypatch.setattr("mpidp.world.launch._world", SimpleNamespace(rank=0, size=4))


def heavy_modules_after(code: str, *words: str) -> set[str]:
    """Run code in a fresh interpreter and return which heavy modules it has imported."""
    watched = ("torch", "mpi4py", "h5py", "numpy")
    report = f"import sys; print('LOADED', *[name for name in {watched} if name in sys.modules])"
    child = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}", *words], capture_output=True, text=True, check=True
    )
    return set(child.stdout.splitlines()[-1].split()[1:])


@pytest.mark.job
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--help"],
        ["--version"],
        ["data", "--help"],
        ["no_such_command"],
        ["train", "run.toml", "--help"],
        ["train", "run.toml", "--print-config"],
        ["submit", "--help"],
        ["status", "--help"],
        ["bench", "allreduce", "--help"],
        ["bench", "loader", "--help"],
        ["report", "--help"],
        ["doctor", "--help"],
        ["data", "convert", "--help"],
    ],
)
def test_what_a_login_node_asks_imports_nothing_heavy(words: list[str], run_file: str) -> None:
    """Behaviour 40."""
    words = [run_file if word == "run.toml" else word for word in words]
    loaded = heavy_modules_after("import sys; from mpidp.cli import main; main(sys.argv[1:])", *words)
    assert loaded <= ({"numpy"} if words[:1] == ["report"] else set())


@pytest.mark.job
def test_importing_the_package_imports_nothing_heavy() -> None:
    """Behaviour 40."""
    assert heavy_modules_after("import mpidp; dir(mpidp); mpidp.errors.ConfigError") == set()
    assert heavy_modules_after("import numpy") == {"numpy"}  # the watch sees them


def test_public_names() -> None:
    expected = {
        "Batch",
        "Checkpoints",
        "DataParallel",
        "FieldSpec",
        "HDF5Loader",
        "ShardedOptimizer",
        "Shares",
        "StopSignal",
        "Elastic",
        "TrainState",
        "SyncBatchNorm",
        "Trace",
        "World",
        "__version__",
        "errors",
        "init",
        "shares",
    }
    assert set(mpidp.__all__) == expected
    assert expected <= set(dir(mpidp))
    assert all(getattr(mpidp, name) is getattr(mpidp, name) for name in expected)
    with pytest.raises(AttributeError, match="no attribute 'initt'"):
        mpidp.initt  # noqa: B018


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpidp {mpidp.__version__}\n"
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(f"  {command.name} {command.takes}\n" in help_text for command in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().out == help_text
    assert main(["data", "-h"]) == 0
    assert "data inspect FILE" in (text := capsys.readouterr().out) and "bench" not in text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """What the table names is there, each option has a text, and what is run is given what the table says."""
    assert main([*command.name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: mpidp {command.name}")
    assert options_in(text) and not re.findall(r"^  (--[\w.-]+)(?: \S+)?$\n(?! {8})", text, flags=re.MULTILINE)
    module, _, name = command.run.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.job
def test_python_dash_m_exits_with_the_code() -> None:
    child = subprocess.run([sys.executable, "-m", "mpidp", "trian"], capture_output=True, text=True)
    assert child.returncode == 2
    assert child.stdout == ""
    assert child.stderr.startswith("mpidp: error: unknown command mpidp trian. Did you mean mpidp train?")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "Did you mean mpidp train?"),
        (["zzz"], "Known: train, predict, submit"),
        (["data", "inspct"], "Did you mean mpidp data inspect?"),
        (["data", "inspect"], "arguments are required: FILE"),
        (["data", "inspect", "a", "b"], "unknown word b"),
        (["report"], "arguments are required: RUN_FOLDER"),
        (["data", "verify", "a.h5", "--limit=0"], "--limit=0; expected at least 1"),
        (
            ["data", "convert", "a.npy", "b.h5", "--chunk_row=3"],
            "unknown option --chunk_row=3. Did you mean '--chunk-rows'?",
        ),
        (["data", "convert", "a.npy", "b.h5", "--chunk-bytes=3x"], "--chunk-bytes: 3x; expected bytes, such as"),
        (["bench", "step", "--repeats", "two"], "--repeats: 'two' is no integer"),
        (["bench", "allreduce", "--bytes=4k"], "--bytes: "),
        (["bench", "step", "--model=cnn"], "invalid choice: 'cnn'"),
        (["train", "missing.toml"], "run file missing.toml: no such file"),
        (["train"], "data.train = ()"),
        (["train", "--dry-run", "late.toml"], "the run file comes first: mpidp train late.toml"),
        (["train", "--ranks", "4", "--data.train=a", "--model.name=b"], "--ranks is for --dry-run"),
        (["train", "--dry-run", "--ranks", "-4", "--data.train=a", "--model.name=b"], "--ranks=-4"),
        (["train", "--data.train=a", "--model.name=b", "--train.epochs=0"], "train.epochs = 0"),
        (["train", "--model.arguments.width"], "--model.arguments.width has no value"),
        (["train", "--model.arguments.width={a = 1}"], "model.arguments.width = {'a': 1}"),
        (
            ["train", "--data.train=a", "--model.name=b", "--data.stream=2"],
            "--data.stream=2. Did you mean '--data.streams'?",
        ),
        (["train", "--data.train=a", "--model.name=b", "--train.precision=int"], "float64"),
        (["train", "--data.train=a", "--model.name=b", "--optimizer.sharded=yes"], "'yes'; expected true or false"),
    ],
)
def test_a_wrong_word_ends_with_2_and_the_way_out(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert expected in captured.err and captured.err.count("\n") == (2 if words == ["train"] else 1)
    assert captured.out == ""


@pytest.mark.parametrize("words", [["trian"], ["train", "missing.toml"], ["train", "--no-such-option"]])
def test_only_rank_0_of_the_launcher_speaks(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpidp.world.launch._world", None)  # another test may have started MPI here
    monkeypatch.setenv("PMI_RANK", "1")
    assert main(words) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("PMI_RANK", "0")
    assert main(words) == 2
    assert capsys.readouterr().err != ""


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(run_file: str) -> None:
    options = read_options([run_file, "--data.global_batch", "9", "--train.epochs=3", "--data.train", "a.h5", "b.h5"])
    assert options.config.data.global_batch == 9
    assert options.config.data.train == ("a.h5", "b.h5")
    assert options.config.train.epochs == 3
    assert options.config.model.name == "cnn"
    assert options.config.data.fields == ("x", "y")
    assert not options.dry_run


def test_hyphens_and_underscores_are_the_same(run_file: str) -> None:
    assert read_options([run_file, "--data.global-batch=8", "--dry_run"]) == read_options(
        [run_file, "--data.global_batch=8", "--dry-run"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--optimizer.sharded=true", "--checkpoint.background=false"],
        ["--optimizer.sharded", "true", "--checkpoint.background", "false"],
        ["--optimizer.sharded=True", "--checkpoint.background", "False"],
    ],
)
def test_booleans_may_be_spelt_as_in_the_file(run_file: str, words: list[str]) -> None:
    config = read_options(
        [run_file, "--run.name", "true", *words, "--data.allow-holes=true", "--run.folder=false"]
    ).config
    assert (config.optimizer.sharded, config.checkpoint.background, config.data.allow_holes) == (True, False, True)
    assert (config.run.name, config.run.folder) == ("true", "false")


def test_keyword_arguments_are_laid_over_those_of_the_file(run_file: str) -> None:
    words = ["--model.arguments.depth=[1, 2]", "--model.arguments.act", "gelu", "--optimizer.arguments.eps=1e-6"]
    Path(run_file).write_text(f"{RUN_FILE}[data.field.x]\nscale = 2")
    config = read_options([run_file, *words, "--model.arguments.width=0.5", "--data.field.x.offset=1e3"]).config
    assert config.data.field == {"x": FieldSection(scale=2.0, offset=1000.0)}
    assert config.model.arguments == {"width": 0.5, "depth": [1, 2], "act": "gelu"}
    assert config.optimizer.arguments == {"betas": [0.9, 0.95], "eps": 1e-6}


def options_in(help_text: str) -> list[str]:
    """Return the option names that begin a line of help."""
    starts = re.findall(r"^  (-.+?)(?: {2,}|$)", help_text, flags=re.MULTILINE)
    return [name for start in starts for name in re.findall(r"--[a-z][\w.-]*", start)]


def test_help_lists_exactly_the_recorded_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    assert sorted(options_in(capsys.readouterr().out)) == sorted(TRAIN_OPTIONS.split())


def test_help_shows_the_values_of_the_file(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", run_file, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for option, default in {"--data.global_batch INT": "32", "--model.name TEXT": "cnn"}.items():
        assert re.search(rf"{re.escape(option)} [^(]*\. \(default: {default}\)", text), option


def test_options_of_other_commands() -> None:
    words = ["a.npy", "b.npy", "--fields=x,y", "c.h5", "--chunk_bytes", "1.5KiB", "--mode=L"]
    expected = ConvertOptions(chunk_bytes=1536, paths=("a.npy", "b.npy", "c.h5"), fields=("x", "y"), mode="L")
    assert parse(ConvertOptions, "mpidp data convert", words) == expected
    assert parse(VerifyOptions, "mpidp data verify", ["--json", "a.h5"]) == VerifyOptions(("a.h5",), json=True)
    with pytest.raises(HelpWanted, match="How many findings are named for each file"):
        parse(VerifyOptions, "mpidp data verify", ["a.h5", "-h"])


def test_print_config_shows_what_would_run(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", run_file, "--print-config", "--run.seed=7"]) == 0
    (Path(run_file).parent / "again.toml").write_text(capsys.readouterr().out)
    assert read_options([str(Path(run_file).parent / "again.toml")]) == read_options([run_file, "--run.seed=7"])


def test_train_is_given_the_configuration_and_the_run_to_resume(
    run_file: str, train_with: Callable[[BaseException | None], Trained]
) -> None:
    calls = train_with(None)
    assert main(["train", run_file, "--resume", "runs/old"]) == 0
    assert calls == [(read_options([run_file]).config, Path("runs/old"))]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DataError("digits.h5: no such file"), 1, "mpidp: error: digits.h5: no such file\n"),
        (ConfigError("model.name = 'cn'"), 2, "mpidp: error: model.name = 'cn'\n"),
        (KeyboardInterrupt(), 130, "mpidp: error: interrupted\n"),
    ],
)
def test_a_failed_run_says_why_once(
    error: BaseException,
    code: int,
    text: str,
    run_file: str,
    train_with: Callable[[BaseException | None], Trained],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mpidp.world.launch._world", None)  # another test may have started MPI here
    train_with(error)
    assert main(["train", run_file]) == code
    assert capsys.readouterr().err == text


def test_a_bug_keeps_its_traceback(run_file: str, train_with: Callable[[BaseException | None], Trained]) -> None:
    """Behaviour 30."""
    train_with(ZeroDivisionError("bug"))
    with pytest.raises(ZeroDivisionError):
        main(["train", run_file])


@pytest.mark.usefixtures("four_ranks")
def test_an_error_that_all_ranks_share_lets_them_leave_by_themselves(
    run_file: str, train_with: Callable[[BaseException | None], Trained], capsys: pytest.CaptureFixture[str]
) -> None:
    """Behaviour 29: one message on all ranks, with the rank it came from."""
    error = DataError("digits.h5: truncated")
    error.add_note("on rank 0 of 4 (node7), opening the data")
    setattr(error, SHARED_MARK, True)
    train_with(error)
    assert main(["train", run_file]) == 1
    assert capsys.readouterr().err == (
        "mpidp: error: digits.h5: truncated\n  on rank 0 of 4 (node7), opening the data\n"
    )


@pytest.mark.usefixtures("four_ranks")
def test_the_first_rank_speaks_whatever_the_launcher_called_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 31: when the launcher's rank 0 has died, another one is rank 0."""
    monkeypatch.setenv("PMI_RANK", "2")
    monkeypatch.setenv("PMI_SIZE", "4")
    assert speaks()
    monkeypatch.setattr("mpidp.world.launch._world", None)
    assert not speaks()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("error", [DataError("disk gone"), KeyboardInterrupt()])
def test_an_error_of_one_rank_alone_is_left_to_end_the_job(
    error: BaseException, run_file: str, train_with: Callable[[BaseException | None], Trained]
) -> None:
    """Behaviour 30: the other ranks would wait for ever if this one left with a polite exit code."""
    train_with(error)
    with pytest.raises(type(error)):
        main(["train", run_file])
