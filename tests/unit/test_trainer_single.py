"""Whole runs in one process: what the run folder holds, and that every setting does what it says."""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from small_runs import ROWS, contents, losses, records, small_config, small_net, small_run, weights
from torch import nn

import mpidp
from mpidp.config import RunConfig
from mpidp.train import run as run_module
from mpidp.train.run import choose_threads
from mpidp.train.trainer import Trainer

Run = Callable[..., Path]


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    return partial(small_config, tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return partial(small_run, tmp_path)


def test_the_run_folder_and_the_schema_of_its_metrics(run: Run) -> None:
    """docs/reference/metrics.md describes these records field by field."""
    folder = run()
    names = {"config.toml", "env.json", "metrics.jsonl", "checkpoints", "logs"}
    assert {path.name for path in folder.iterdir()} >= names
    assert [path.name for path in sorted((folder / "checkpoints").glob("step_*"))] == ["step_00000005", "step_00000010"]
    training, held_out = records(folder, "train"), records(folder, "validation")
    assert [record["step"] for record in training] == [2, 4, 5, 6, 8, 10]
    assert [record["epoch"] for record in training] == [0, 0, 0, 1, 1, 1]
    assert [record["samples"] for record in training] == [20, 20, 2, 10, 20, 12]
    assert [(record["step"], record["epoch"], record["samples"]) for record in held_out] == [(5, 0, 11), (10, 1, 11)]
    for record in training:
        assert list(record) == [
            *("kind", "step", "epoch", "samples", "loss", "accuracy"),
            *("lr", "grad_norm", "samples_per_s", "seconds", "memory_bytes"),
        ]
        assert record["seconds"].keys() == {"data", "forward", "backward", "reduce", "optimizer"}
        assert all(value >= 0 for value in record["seconds"].values())
        assert record["samples_per_s"] > 0 and record["memory_bytes"]["host"] > 2**20 and record["lr"] == 0.01
        assert 0 < record["grad_norm"] < 10
    for record in held_out:
        assert list(record) == ["kind", "step", "epoch", "samples", "loss", "accuracy"]
    for record in [*training, *held_out]:
        assert 0 <= record["accuracy"] <= 1 and math.isfinite(record["loss"])


def test_records_and_folders_are_brought_to_the_disk(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaviour 41: a run that starts in a new place can be found, and its records read, after a power cut."""
    flushed: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(Path(os.readlink(f"/proc/self/fd/{number}"))))
    folder = run()
    assert {folder.parent, tmp_path} <= set(flushed)
    # Once for each of the two checkpoints; their folder after each of these, and after each record.
    assert [flushed.count(folder / name) for name in ("metrics.jsonl", "config.toml")] == [2, 2]
    assert flushed.count(folder) >= 4
    assert {folder / "env.json.new", folder / "config.toml.new"} <= set(flushed)


def test_a_second_run_repeats_the_first_and_leaves_it_alone(run: Run) -> None:
    first = run()
    before = contents(first)
    second = run()
    assert contents(first) == before
    assert second.name == "run-2" and losses(second) == losses(first)


def test_another_seed_is_another_run(run: Run) -> None:
    assert losses(run(run__seed=1)) != losses(run())


@pytest.mark.parametrize("micro_batch", [1, 3, 10, 99])
def test_micro_batches_change_nothing_but_rounding(run: Run, micro_batch: int) -> None:
    """Behaviour 13."""
    double = {"train__precision": "float64", "train__clip_norm": 0.5}
    whole, parts = run(**double), run(train__micro_batch=micro_batch, **double)
    for ours, theirs in zip(losses(parts), losses(whole), strict=True):
        assert ours[:2] == theirs[:2] and ours[2] == pytest.approx(theirs[2], rel=1e-12)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], tensor, rtol=1e-12, atol=1e-14)


def test_the_trainer_takes_the_steps_of_plain_torch(run: Run, config: Callable[..., RunConfig]) -> None:
    """Behaviour 6, with clipping and a schedule: bit for bit."""
    settings = config()
    folder = run(train__clip_norm=0.3, scheduler__name="StepLR", scheduler__arguments={"step_size": 3})
    loader = mpidp.HDF5Loader(settings.data.train, ("x", "y"), 10, 0, split=("train", 0.2))
    torch.manual_seed(0)
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(2):
        for batch in loader:
            nn.functional.cross_entropy(model(batch.x), batch.y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights(folder)[name], tensor), name
    assert records(folder, "train")[-1]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)


def test_float64(run: Run) -> None:
    folder = run(train__precision="float64")
    assert {tensor.dtype for tensor in weights(folder).values()} == {torch.float64}


def test_never_a_checkpoint(run: Run) -> None:
    folder = run(checkpoint__every_epochs=0)
    assert list((folder / "checkpoints").iterdir()) == []


def test_the_last_epoch_is_saved_whatever_the_interval(run: Run) -> None:
    folder = run(checkpoint__every_epochs=2, train__epochs=3)
    assert [path.name for path in sorted((folder / "checkpoints").glob("step_*"))] == ["step_00000010", "step_00000015"]


def test_epochs_only(run: Run) -> None:
    assert [record["step"] for record in records(run(log__every_steps=0), "train")] == [5, 10]


def test_without_held_out_samples(run: Run) -> None:
    folder = run(data__validation_fraction=0.0)
    assert records(folder, "validation") == [] and len(records(folder, "train")) > 0


def test_held_out_files_of_any_length(run: Run, config: Callable[..., RunConfig]) -> None:
    """Behaviour 26."""
    files = {"data__validation": config().data.train, "data__validation_fraction": 0.0}
    assert {record["samples"] for record in records(run(**files), "validation")} == {ROWS}


def test_the_summary_names_the_folder_and_where_the_time_went(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run()
    text = capsys.readouterr().out
    assert "Trained 10 steps on 1 rank" in text and str(folder) in text and "waiting for data" in text


def test_on_end_gets_the_plain_trained_model(config: Callable[..., RunConfig]) -> None:
    trainer = Trainer(run_module.Run(config(), mpidp.init()))
    seen: list[tuple[nn.Module, RunConfig]] = []
    trainer.run.on_end = lambda model, config: seen.append((model, config))
    trainer.train()
    assert seen == [(trainer.model.module, trainer.config)]


@pytest.mark.parametrize(
    ("configured", "environment", "cores", "expected"),
    [
        (3, {"OMP_NUM_THREADS": "2"}, 8, 3),
        (0, {"OMP_NUM_THREADS": "2"}, 8, 2),
        (0, {}, 8, 8),
        (0, {"OMP_NUM_THREADS": "x"}, 4, 4),
    ],
)
def test_threads(configured: int, environment: dict[str, str], cores: int, expected: int) -> None:
    assert choose_threads(configured, environment, cores) == expected
