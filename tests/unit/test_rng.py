"""Random streams: different on every rank, the same in every repetition, and put back where they were."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpidp.train.state import capture_streams, restore_streams, seed_streams

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def streams_as_before() -> Iterator[None]:
    before = capture_streams(CPU)
    yield
    restore_streams(before, CPU)


def draw() -> tuple[Any, ...]:
    """Numbers of every stream; the normal ones leave a second one cached, which is part of the state."""
    return (
        tuple(torch.rand(3).tolist()),
        tuple(torch.randn(17).tolist()),
        tuple(np.random.random(3).tolist()),
        float(np.random.standard_normal()),
        random.random(),
        random.gauss(0, 1),
    )


def test_capture_and_restore_go_on_with_the_same_numbers(tmp_path: Path) -> None:
    """Behaviour 43."""
    seed_streams(1, 2, 3)
    draw()
    state = capture_streams(CPU)
    expected = [draw() for _ in range(5)]
    torch.save(state, tmp_path / "streams.pt")
    seed_streams(9, 9, 9)
    draw()
    restore_streams(torch.load(tmp_path / "streams.pt", weights_only=True), CPU)
    assert [draw() for _ in range(5)] == expected


def test_capture_draws_nothing_and_does_not_move_on_with_the_stream() -> None:
    seed_streams(0, 0, 0)
    first = draw()
    seed_streams(0, 0, 0)
    state = capture_streams(CPU)
    assert draw() == first
    for _ in range(2):
        restore_streams(state, CPU)
        assert draw() == first


def test_every_seed_rank_and_step_has_streams_of_its_own() -> None:
    """Behaviour 19."""
    places = [(seed, rank, step) for seed in (0, 1, 2**40) for rank in range(4) for step in (0, 1, 100)]
    drawn = []
    for place in places:
        seed_streams(*place)
        drawn.append(draw())
    for stream in zip(*drawn, strict=True):
        assert len(set(stream)) == len(places)
    for place, numbers in zip(places, drawn, strict=True):
        seed_streams(*place)
        assert draw() == numbers
