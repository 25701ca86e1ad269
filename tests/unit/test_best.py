"""The best checkpoint and early stopping: which value counts, what stays on the disk, and a resume in the middle."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import losses, records, small_config, small_run, weights
from torch import nn

from mpidp.errors import CheckpointError, ConfigError
from mpidp.train.best import Best
from mpidp.train.checkpoint import saver
from mpidp.train.checkpoint.read import best, load, newest_first
from mpidp.train.checkpoint.saver import Saver
from mpidp.train.records.recorder import Recorder
from mpidp.validate import validate
from mpidp.world.world import World


def of(*values: float, metric: str = "validation_loss", min_delta: float = 0.0) -> Best:
    found = Best(metric, min_delta)
    for epoch, value in enumerate(values):
        found.add({"loss": value, "accuracy": value}, epoch, 5 * (epoch + 1))
    return found


def test_a_loss_is_better_if_lower_and_an_accuracy_if_higher() -> None:
    assert (of(3, 1, 2).value, of(3, 1, 2).epoch, of(3, 1, 2).step, of(3, 1, 2).epochs_since) == (1, 1, 10, 1)
    assert of(0.1, 0.3, 0.2, metric="validation_accuracy").value == 0.3


def test_small_gains_equal_values_and_nan_are_not_better() -> None:
    assert of(3, 2.95, 2.92, min_delta=0.1).epochs_since == 2
    assert of(3, 3).epochs_since == 1
    assert (of(float("nan"), 3, float("nan")).value, of(float("nan"), 3, float("nan")).epochs_since) == (3, 1)


def test_an_evaluation_once_more_changes_nothing() -> None:
    found = of(3, 4)
    found.add({"loss": 4.0}, 1, 10)
    assert found.epochs_since == 1
    again = Best("validation_loss")
    again.load_state_dict(found.state_dict())
    assert again.state_dict() == found.state_dict()


def test_a_metric_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="best validation_accuracy, and the evaluation has loss only"):
        Best("validation_accuracy").add({"loss": 1.0}, 0, 5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"checkpoint__best": "validation_loss", "data__validation_fraction": 0.0},
            "checkpoint.best = 'validation_loss'",
        ),
        (
            {"train__early_stopping": {"metric": "validation_loss", "patience_epochs": 0}},
            "expected patience_epochs of at least 1",
        ),
        ({"train__early_stopping": {"min_delta": -1.0}}, "and min_delta of at least 0"),
    ],
)
def test_what_a_run_file_cannot_say(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(small_config(tmp_path, **changes))


def give_losses(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Let the evaluation after each epoch find these values."""
    record = Recorder.record_validation

    def recorded(self: Recorder, step: int, epoch: int, tally: Any) -> None:
        record(self, step, epoch, tally)
        assert self.last_validation is not None
        self.last_validation["loss"] = values[epoch]

    monkeypatch.setattr(Recorder, "record_validation", recorded)


@pytest.mark.parametrize("every_steps", [0, 5])
def test_the_best_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_steps: int) -> None:
    """Though newer ones push out the others, and also if the step was saved before its evaluation."""
    give_losses(monkeypatch, [3, 1, 2, 2, 2])
    changes = {"checkpoint__best": "validation_loss", "checkpoint__keep": 1, "checkpoint__every_epochs": 1}
    run = small_run(tmp_path, train__epochs=5, checkpoint__every_steps=every_steps, **changes)
    folder = run / "checkpoints"
    assert [path.name for path in newest_first(folder)] == ["step_00000025", "step_00000010"]
    assert best(folder) == folder / "step_00000010"
    assert load(best(folder))["step"] == 10


def test_the_best_is_saved_though_no_save_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_losses(monkeypatch, [3, 1, 2, 2])
    run = small_run(tmp_path, train__epochs=4, checkpoint__best="validation_loss", checkpoint__every_epochs=0)
    assert [path.name for path in newest_first(run / "checkpoints")] == ["step_00000010", "step_00000005"]


def test_a_best_one_that_could_not_be_written_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no later one would stay, as its value is never reached again."""
    give_losses(monkeypatch, [3, 1, 2, 4])
    write = saver.write_parts

    def write_parts(place: Path, *args: Any) -> Any:
        if "step_00000010" in place.name:
            raise CheckpointError("no room")
        return write(place, *args)

    monkeypatch.setattr(saver, "write_parts", write_parts)
    changes = {"checkpoint__best": "validation_loss", "checkpoint__keep": 1, "checkpoint__on_failure": "warn"}
    folder = small_run(tmp_path, train__epochs=4, **changes) / "checkpoints"
    assert best(folder) == folder / "step_00000015"


def test_marking_waits_for_no_write(tmp_path: Path) -> None:
    """The checkpoint that is being written is published with the link."""
    begun, goes_on = threading.Event(), threading.Event()

    def shared() -> dict[str, Any]:
        return {"x": torch.zeros(1)}

    found = Saver(World.alone(), tmp_path, keep=1)
    found._thread.submit(lambda: (begun.set(), goes_on.wait(60)))
    assert begun.wait(60)
    found.save(5, shared, dict)
    found.mark_best(5)
    assert found.is_busy
    goes_on.set()
    found.finish()
    found.close()
    assert best(tmp_path).name == "step_00000005"


def test_an_epoch_is_saved_before_a_metric_is_missed(tmp_path: Path) -> None:
    """A regression has no accuracy, which only the first evaluation shows."""
    changes = {"checkpoint__best": "validation_accuracy", "loss__name": "mse_loss", "model__name": f"{__name__}:row"}
    with pytest.raises(ConfigError, match="best validation_accuracy, and the evaluation has loss only"):
        small_run(tmp_path, **changes)
    assert [path.name for path in newest_first(tmp_path / "runs" / "run" / "checkpoints")] == ["step_00000005"]


def row(**_: Any) -> nn.Module:
    """A model that predicts one number a sample, as the target is."""
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


def test_no_best(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"no best checkpoint in .* set checkpoint.best"):
        best(run / "checkpoints")


STOPPING = {"metric": "validation_loss", "patience_epochs": 2}


def test_training_stops_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give_losses(monkeypatch, [3, 1, 2, 2, 2, 2])
    caplog.set_level(logging.INFO, "mpidp")
    run = small_run(tmp_path, train__epochs=6, train__early_stopping=STOPPING, checkpoint__every_epochs=3)
    assert [record["epoch"] for record in records(run, "validation")] == [0, 1, 2, 3]
    assert newest_first(run / "checkpoints")[0].name == "step_00000020"
    assert caplog.text.count("stopped early: validation_loss was best, 1, in epoch 2, and not better for 2 epochs") == 1
    small_run(tmp_path, resume=run, train__epochs=6, train__early_stopping=STOPPING)
    assert len(records(run, "validation")) == 4, "it is over"


def test_a_resume_stops_where_the_run_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an epoch without a gain the count goes on from the checkpoint."""
    give_losses(monkeypatch, [3, 1, 2, 2, 2, 2])
    settings = {"train__early_stopping": STOPPING, "checkpoint__best": "validation_loss"}
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = small_run(tmp_path / "whole", train__epochs=6, **settings)
    first = small_run(tmp_path / "parts", train__epochs=3, **settings)
    small_run(tmp_path / "parts", resume=first, train__epochs=6, **settings)
    assert losses(first) == losses(whole)
    assert all((weights(whole)[name] == tensor).all() for name, tensor in weights(first).items())
    assert best(first / "checkpoints").name == best(whole / "checkpoints").name == "step_00000010"
