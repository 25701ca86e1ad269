"""Checkpoints when the process dies while it saves: raised exceptions stand for kill -9 at every change of a file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_states import check_state, names, save, state_of

from mpidp.train.checkpoint.read import newest


class Crash(BaseException):
    """Stands for kill -9: nothing in the library may catch it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the `number`-th change of the file system raise instead; half of a file may have been written."""
    calls = 0

    def counted(function: Callable[..., Any], instead: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                if instead is not None:
                    instead(*args)
                raise Crash
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "symlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(torch, "save", counted(torch.save, lambda state, file: file.write(b"PK" * 50)))
    monkeypatch.setattr(json, "dumps", counted(json.dumps))


@pytest.mark.parametrize("scene", ["first", "older ones", "full", "damaged same step", "left by a crash"])
def test_a_crash_at_any_point_of_saving_leaves_a_loadable_checkpoint(tmp_path: Path, scene: str) -> None:
    """Behaviour 41."""
    number = 0
    finished = False
    while not finished:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        before = _set_scene(folder, scene)
        with pytest.MonkeyPatch.context() as monkeypatch:
            crash_at(monkeypatch, number)
            try:
                save(folder, 9, state_of(9), keep=2)
                finished = True
            except Crash:
                pass
        if (folder / "latest").is_symlink() and scene != "damaged same step":
            assert (folder / "latest").exists(), "it never points to nothing"
        if before:
            path, _ = newest(folder)
            check_state(path, 9 if path.name == "step_00000009" else before)
        assert (
            check_state(save(folder, 9, state_of(9), keep=2, token="u"), 9) is None
        )  # a second try is not in its own way
        assert newest(folder)[0].name == "step_00000009"
        assert all(name.startswith("step_") or name == "latest" for name in names(folder)), "left behind for good"
        check_state(folder / "latest", 9)
    assert number > 15


def _set_scene(folder: Path, scene: str) -> int:
    """Prepare a folder; returns the step of its newest usable checkpoint, 0 for none."""
    if scene == "first":
        return 0
    steps = {"full": (3, 4)}.get(scene, (4,))
    for step in steps:
        save(folder, step, state_of(step), keep=2)
    if scene == "damaged same step":
        (save(folder, 9, state_of(9), keep=2) / "state.pt").write_bytes(b"")
    if scene == "left by a crash":
        with pytest.MonkeyPatch.context() as monkeypatch:
            crash_at(monkeypatch, 4)
            with pytest.raises(Crash):
                save(folder, 9, state_of(9), keep=2, token="dead")
    return 4
