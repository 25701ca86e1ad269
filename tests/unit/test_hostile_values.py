"""Values that try to leave their place in a script, a path or a line: refused, or one word (Behaviour 56)."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpidp.cli import main
from mpidp.errors import ConfigError
from mpidp.printable import listed, shown
from mpidp.tools.submit import read_job, render
from mpidp.tools.train import read_options

JOBS = Path(__file__).parents[2] / "jobs"
NASTY = ["\n", "\r", "\0", "\t", " ", "'", '"', "$", "`", ";", "&", "|", "\\", "#", "-", "..", "/", "%", "é", "\u2028"]
hostile = st.lists(st.sampled_from([*NASTY, "$(touch owned)", "\nSBATCH", "a", "0", "=", ","]), max_size=6).map("".join)
# Prints its words, each behind a byte that no word can hold; `srun` and what it is given are asked what arrived.
TELL = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$@" >>"$ARRIVED"\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, and stubs of Slurm's commands in `bin`."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "run.toml").write_text('run = {name = "digits"}\ndata = {train = "a.h5"}\nmodel = {name = "cnn"}\n')
    (folder / "bin").mkdir()
    for name in ("srun", "scontrol"):
        (folder / "bin" / name).write_text(TELL)
        (folder / "bin" / name).chmod(0o755)
    return folder


def arrived(script: str, place: Path, **environment: str) -> list[str]:
    """Run a script with stubs of Slurm's commands; the words that they were given, in order."""
    told = place / "arrived"
    told.unlink(missing_ok=True)
    variables = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "ARRIVED": str(told), "SLURM_CPUS_PER_TASK": "1"}
    subprocess.run(["bash", "-n"], input=script, encoding="utf-8", check=True)
    subprocess.run(["bash"], input=script, encoding="utf-8", cwd=place, env=variables | environment)
    assert not (place / "owned").exists(), script
    return told.read_bytes().decode().split("\0")[:-1]


def sbatch_words(script: str) -> list[str]:
    """The words of all #SBATCH lines, read as sbatch reads them: up to the first command, with its own quotes."""
    words = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            words += _words_of(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def _words_of(line: str) -> Iterator[str]:
    word, quote, escaped = "", "", False
    for character in f"{line} ":
        if escaped:
            word, escaped = word + character, False
        elif character == "\\":
            escaped = True
        elif quote:
            word, quote = (word, "") if character == quote else (word + character, quote)
        elif character in "'\"":
            quote = character
        elif character == "#":
            break
        elif not character.isspace():
            word += character
        elif word:
            yield word
            word = ""
    assert not quote and not escaped, line


@pytest.mark.job
@settings(max_examples=60, deadline=None)
@given(option=st.sampled_from(["run.name", "partition", "account", "qos", "mpi", "sbatch", "loss.name"]), value=hostile)
@example("run.name", "x\necho no comment any more #")
@example("run.name", "a b")
@example("partition", "gpu #SBATCH --uid=0")
@example("sbatch", "--comment=a b #c")
@example("sbatch", "--comment=a --uid=0")
def test_every_value_is_one_word_of_the_script_or_refused(place: Path, option: str, value: str) -> None:
    """By way of the command line, as a user gives it. A value of the model's own may hold anything but line breaks."""
    given = f"--{option}={value}"
    free = f"--model.arguments.text={value}"
    words = [str(place / "run.toml"), "--ranks-per-node=2", "--requeue", given, free]
    try:
        job, config = read_job(words)
    except ConfigError as error:
        assert "control character" in str(error) or option in str(error) or "--sbatch" in str(error)
        return
    script = render(job)
    directives = {"run.name": f"--job-name={value}", "sbatch": value}
    found = sbatch_words(script)
    assert len(found) == script.count("\n#SBATCH "), "a line of options is one word"
    if option in ("run.name", "partition", "account", "qos", "sbatch") and value:
        assert directives.get(option, given) in found
    code_75 = [*arrived(script.replace("code=0", "code=75"), place, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="0")]
    trained = ["srun", "-K", f"--mpi={job.options.mpi}", sys.executable, "-m", "mpidp", "train", *job.words]
    assert code_75 == [*trained, "scontrol", "requeue", "7"]
    assert free in job.words and config.model.arguments["text"] is not None


REFUSED = ["", ".", "..", ".hidden", "-x", " x", "x ", "a/b", "a\nb", "a'b", "a$b", "a%j", "x" * 201]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("by", ["file", "command line"])
def test_a_name_that_is_no_plain_folder_name_is_refused(place: Path, name: str, by: str) -> None:
    file = place / "named.toml"
    text = (place / "run.toml").read_text()
    file.write_text(text.replace('"digits"', f'"{name}"'.replace("\n", "\\n")) if by == "file" else text)
    with pytest.raises(ConfigError, match=r"run\.name = .*; expected"):
        read_options([str(file), *([f"--run.name={name}"] if by == "command line" else [])])


@pytest.mark.parametrize("name", ["a b", "lr=1e-3,wd=0.1", "mnist_v1.2+aug", "über", "模型", "x@node"])
def test_a_plain_name_is_taken(place: Path, name: str) -> None:
    assert read_options([str(place / "run.toml"), f"--run.name={name}"]).config.run.name == name


def test_other_texts_of_a_run_file_hold_no_control_characters(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.folder = 'a\\x00b'; expected.*\n.*data\.train = 'a\\nb'; expected"):
        read_options([str(place / "run.toml"), "--run.folder=a\0b", "--data.train=a\nb"])
    texts = read_options([str(place / "run.toml"), "--model.arguments.text=a\nb"]).config.model.arguments
    assert texts == {"text": "a\nb"}, "keyword arguments are the model's own business"


@pytest.mark.job
def test_a_count_in_the_environment_is_never_run(place: Path) -> None:
    """Bash runs commands in array subscripts of whatever it takes for arithmetic."""
    job, _ = read_job([str(place / "run.toml"), "--ranks-per-node=2", "--requeue"])
    script = render(job).replace("code=0", "code=75")
    assert "scontrol" not in arrived(script, place, SLURM_RESTART_COUNT="a[$(touch owned)]", SLURM_JOB_ID="7")


@pytest.mark.job
@pytest.mark.parametrize("template", sorted(path.name for path in JOBS.glob("*.sbatch")))
def test_words_and_environment_reach_the_templates_as_they_are(place: Path, template: str) -> None:
    first = {"chain.sbatch": ["3"], "container.sbatch": ["image $(touch owned).sif"], "stage.sbatch": ["run.toml"]}
    words = [
        *first.get(template, []),
        "my run.toml",
        "--run.name=$(touch owned)",
        "--model.arguments.text=`touch owned`",
    ]
    (place / "local").mkdir(exist_ok=True)
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1",
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_RESTART_COUNT": "a[$(touch owned)]",
        "MPI_KIND": "pmix; touch owned",
        "NODE_LOCAL": str(place / "local"),
    }
    (place / "bin" / "sbatch").write_text(f"{TELL}echo '8;cluster'\n")
    (place / "bin" / "sbatch").chmod(0o755)
    script = f"set -- {' '.join(map(_quoted, words))}\n" + (JOBS / template).read_text()
    found = arrived(script, place, **environment)
    assert "--mpi=pmix; touch owned" in found
    assert all(word in found for word in words[len(first.get(template, [])) :])


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\"'\"'") + "'"


@pytest.mark.job
@pytest.mark.parametrize(("template", "variable"), [("array.sbatch", "SLURM_ARRAY_TASK_ID"), ("chain.sbatch", "")])
def test_templates_count_with_numbers_only(place: Path, template: str, variable: str) -> None:
    script = "set -- 'a[$(touch owned)]' run.toml\n" + (JOBS / template).read_text()
    environment = {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "7", "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    environment |= {variable: "a[$(touch owned)]"} if variable else {}
    done = subprocess.run(["bash"], input=script, text=True, cwd=place, env=environment, stderr=subprocess.PIPE)
    assert done.returncode == 2 and "a[$(touch owned)]" in done.stderr
    assert not (place / "owned").exists()


@pytest.mark.job
@pytest.mark.parametrize("there", ["nothing", "own", "open", "link"])
def test_data_are_staged_to_a_folder_that_is_closed_to_others(tmp_path: Path, there: str) -> None:
    """A stub of srun runs what is to be done on each node, and looks at the folder in place of training."""
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text(
        '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\n[[ $1 == python ]] && exec ls -ld "$place"\nexec "$@"\n'
    )
    srun.chmod(0o755)
    (tmp_path / "data.h5").write_bytes(b"data")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place = tmp_path / "mpidp-7"
    if there == "link":
        place.symlink_to(tmp_path / "elsewhere")
    elif there != "nothing":
        place.mkdir()
        place.chmod(0o700 if there == "own" else 0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "NODE_LOCAL": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURMD_NODENAME": "n1",
    }
    command = ["bash", JOBS / "stage.sbatch", tmp_path / "data.h5"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if there in ("nothing", "own"):
        assert done.returncode == 0 and re.search(r"^drwx------", done.stdout, re.M), done.stderr
        assert not place.exists()
    else:
        assert done.returncode != 0 and f"{place}: cannot be made" in done.stderr
        assert not list((tmp_path / "elsewhere").iterdir())


def test_what_is_printed_holds_no_escape_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of files may clear a terminal, or set its title."""
    name = "a\x1b]0;owned\x07\udcff.toml"
    (tmp_path / "other\x1b[2J.toml").touch()
    assert main(["train", str(tmp_path / name), "--print-config"]) == 2
    told = capsys.readouterr().err
    assert "\x1b" not in told and "\x07" not in told
    assert r"a\x1b]0;owned\x07\udcff.toml" in told and r"other\x1b[2J.toml" in told


def test_lists_and_values_of_any_length_make_short_messages() -> None:
    assert listed(["a", "b"]) == "a, b" and listed([]) == ""
    assert listed(range(1010)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 1,000 more"
    assert shown("x" * 10**6).startswith("'xxx") and len(shown("x" * 10**6)) < 300
    assert shown(list(range(1000))) == "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "absent.toml"], "run file absent.toml: no such file"),
        (["train", "run.toml", "--data.fields", *(f"f{n}" for n in range(3000)), "--data.train=a\nb"], "data.train"),
        (["data", "inspect", *(f"{n}.h5" for n in range(3000))], "unknown word 1.h5 2.h5"),
        (["train", "strangers.toml"], "there is no such field in data.fields, which has x, y"),
    ],
)
def test_a_message_names_ten_things_at_most(
    place: Path, words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3000 if not (place / "2999.toml").exists() else 0):
        (place / f"{number}.toml").touch()
    strangers = "".join(f'[data.field.z{number}]\ndataset = "x"\n' for number in range(3000))
    (place / "strangers.toml").write_text(f'model = {{name = "cnn"}}\n[data]\ntrain = "a.h5"\n{strangers}')
    monkeypatch.chdir(place)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert expected in told and len(told) < 1200 and told.count("\n") <= 11, told
