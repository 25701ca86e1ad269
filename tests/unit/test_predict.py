"""`mpidp predict` in one process: the values of a plain loop of torch, the file that holds them, and refusals."""

import tomllib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from small_runs import ROWS, small_config, small_net, small_run, weights
from torch import Tensor, nn

from mpidp.cli import main
from mpidp.config import to_toml
from mpidp.tools import inference
from mpidp.train.checkpoint.read import newest, newest_first


class Pair(nn.Linear):
    """Returns what cannot be written, outside of training."""

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return output if self.training else (output, output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with data.h5 and a run of a model that differs in training and evaluation."""
    folder = tmp_path_factory.mktemp("predict")
    small_run(folder, model__arguments={"kind": "batch_norm"}, checkpoint__every_steps=5)
    return folder


@pytest.fixture
def run(folder: Path) -> Path:
    return folder / "runs" / "run"


def plain_loop(folder: Path, state: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    """What torch alone computes, in the batches of file order."""
    model = small_net("batch_norm").eval()
    model.load_state_dict(state)
    with h5py.File(folder / "data.h5") as file, torch.no_grad():
        x = torch.from_numpy(file["x"][:])
        return torch.cat([model(x[start : start + 10]) for start in range(0, ROWS, 10)]).numpy()


def written(path: Path) -> np.ndarray[Any, Any]:
    with h5py.File(path) as file:
        return file[inference.DATASET][:]  # type: ignore[no-any-return]


def test_values_are_those_of_a_plain_loop(run: Path, folder: Path, tmp_path: Path) -> None:
    """Bit for bit on one rank, for every row, though their number is no multiple of the batch."""
    output = tmp_path / "out.h5"
    assert main(["predict", str(run), "--data", str(folder / "data.h5"), f"--output={output}"]) == 0
    assert np.array_equal(written(output), plain_loop(folder, weights(run)))
    assert list(tmp_path.iterdir()) == [output], "nothing else is left"


def test_the_dataset_says_where_it_comes_from(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(run), f"--output={tmp_path / 'out.h5'}"]) == 0
    checkpoint = newest(run / "checkpoints")[0]
    assert f"prediction {ROWS} x 3" in (text := capsys.readouterr().out) and str(checkpoint) in text
    with h5py.File(tmp_path / "out.h5") as file:
        said = dict(file[inference.DATASET].attrs)
    assert (said["run"], said["step"], said["checkpoint"]) == ("run", 10, str(checkpoint))
    assert said["model"] == "small_runs:small_net" and list(said["data"]) == [str(run.parents[1] / "data.h5")]
    assert tomllib.loads(said["config"])["model"]["arguments"] == {"kind": "batch_norm"}


@pytest.mark.parametrize("by_file", [True, False])
def test_a_chosen_checkpoint(run: Path, folder: Path, tmp_path: Path, by_file: bool) -> None:
    older = newest_first(run / "checkpoints")[-1]
    output = tmp_path / "out.h5"
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(small_config(folder, model__arguments={"kind": "batch_norm"})))
    words = [str(run_file), f"--checkpoint={older}"] if by_file else [str(older)]
    assert main(["predict", *words, f"--output={output}"]) == 0
    state = torch.load(older / "state.pt", weights_only=True)["model"]
    assert np.array_equal(written(output), plain_loop(folder, state))
    assert not np.array_equal(written(output), plain_loop(folder, weights(run)))


def test_averages_are_those_of_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the run file says; one that asks for averages that are not there is refused."""
    averaged = small_run(tmp_path, model__arguments={"kind": "batch_norm"}, train__ema_decay=0.5)
    state = torch.load(newest(averaged / "checkpoints")[0] / "state.pt", weights_only=True)
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(small_config(tmp_path, model__arguments={"kind": "batch_norm"})))
    words = [str(run_file), f"--checkpoint={newest(averaged / 'checkpoints')[0]}"]
    assert main(["predict", *words, f"--output={tmp_path / 'out.h5'}"]) == 0
    assert np.array_equal(written(tmp_path / "out.h5"), plain_loop(tmp_path, state["others"]["ema"]["model"]))

    plain = small_run(tmp_path, model__arguments={"kind": "batch_norm"})
    run_file.write_text(to_toml(small_config(tmp_path, model__arguments={"kind": "batch_norm"}, train__ema_decay=0.5)))
    words = [str(run_file), f"--checkpoint={newest(plain / 'checkpoints')[0]}", f"--output={tmp_path / 'other.h5'}"]
    assert "holds no averages, but train.ema_decay = 0.5" in refused(words, 1, capsys)


def test_a_run_file_means_its_newest_run(folder: Path, run: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(small_config(folder, model__arguments={"kind": "batch_norm"})))
    assert main(["predict", str(run_file), f"--output={tmp_path / 'out.h5'}"]) == 0
    assert np.array_equal(written(tmp_path / "out.h5"), plain_loop(folder, weights(run)))


def refused(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["predict", *words]) == code
    return capsys.readouterr().err


def test_nothing_is_overwritten(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.h5"
    output.write_text("mine")
    assert "exists, and is not overwritten" in refused([str(run), f"--output={output}"], 2, capsys)
    assert output.read_text() == "mine"


def test_a_file_that_appears_meanwhile_stays(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do the predictions."""
    output, write = tmp_path / "out.h5", inference.write

    def slow(*arguments: Any) -> tuple[int, ...]:
        output.write_text("another's")
        return write(*arguments)

    monkeypatch.setattr(inference, "write", slow)
    text = refused([str(run), f"--output={output}"], 2, capsys)
    (kept,) = tmp_path.glob(".out.h5.*.partial")
    assert "exists by now" in text and str(kept) in text
    assert output.read_text() == "another's" and len(written(kept)) == ROWS


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["RUN", "--output=FOLDER/no/out.h5"], 2, "cannot be written"),
        (["RUN", "--output=/proc/out.h5"], 2, "cannot be written"),
        (["FOLDER/none"], 1, "no checkpoint in"),
        (["FOLDER/none.toml"], 2, "no such file"),
        (["RUN", "--checkpoint=FOLDER/none"], 1, "there is no such folder"),
        (["RUN", "--data", "FOLDER/none.h5"], 1, "none.h5"),
        (["RUN", "--data", "FOLDER/lacks.h5"], 1, 'no dataset "x"'),
        (["RUN", "--data", "FOLDER/other.h5"], 1, 'field "x" (10, 5) float32'),
        (["RUN", "--fields=x,z"], 2, "the run has no field z, but x, y"),
    ],
)
def test_what_is_refused_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    with h5py.File(tmp_path / "lacks.h5", "w") as file:
        file["y"] = np.zeros(20)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros((20, 5), np.float32)
    before = set(tmp_path.iterdir())
    words = [word.replace("RUN", str(run)).replace("FOLDER", str(tmp_path)) for word in words]
    text = refused([f"--output={tmp_path / 'out.h5'}", *words], code, capsys)
    assert said in text and text.count("mpidp: error: ") == 1
    assert set(tmp_path.iterdir()) == before


def test_a_run_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(small_config(tmp_path)))
    assert "no checkpoint in a folder" in refused([str(run_file), f"--output={tmp_path / 'out.h5'}"], 1, capsys)


def test_a_checkpoint_of_another_model(
    run: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(to_toml(small_config(folder)))
    text = refused([str(run_file), f"--checkpoint={run}", f"--output={tmp_path / 'out.h5'}"], 1, capsys)
    assert "is of another model" in text


def test_an_output_that_is_no_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"in_features": 4, "out_features": 3}
    run = small_run(tmp_path, model__name=f"{__name__}:Pair", model__arguments=arguments, data__validation_fraction=0.0)
    assert "of type tuple for 10 samples" in refused([str(run), f"--output={tmp_path / 'out.h5'}"], 1, capsys)
    assert not list(tmp_path.glob(".out*"))
