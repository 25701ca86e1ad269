"""What looks like a secret in a command line is not written down in a run folder (Behaviour 56)."""

import json
import sys
from pathlib import Path

import pytest

import mpidp
from mpidp.config import DataSection, RunConfig, RunSection
from mpidp.train.records.run_folder import RunFolder
from mpidp.train.records.starts import without_secrets


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model.arguments.api_key=abc", "--model.arguments.api_key=***"),
        ("--api-key abc --train.epochs=3", "--api-key *** --train.epochs=3"),
        ("--accessToken=a=b", "--accessToken=***"),
        ("--hub.token -abc", "--hub.token ***"),
        ("--password --train.epochs=3", "--password --train.epochs=3"),
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=***"),
        ("--x.auth=abc --x.AuthHeader=abc", "--x.auth=*** --x.AuthHeader=abc"),
        ("--credentials.file=abc", "--credentials.file=***"),
        ("--data.train=https://me:a@bc@host/d.h5", "--data.train=https://***@host/d.h5"),
        ("s3://bucket/d.h5?token=abc&part=1", "s3://bucket/d.h5?token=***&part=1"),
        ("https://host/d.h5?v=1&X-Amz-Credential=abc", "https://host/d.h5?v=1&X-Amz-Credential=***"),
        # What a reader of the results wants to know stays.
        ("run.toml --model.arguments.num_tokens=512 --model.arguments.key_dim=64 --run.author=me", None),
        ("--data.train=a:b@c.h5 --optimizer.lr=1e-3 --resume auto", None),
    ],
)
def test_values_of_secrets_are_hidden(words: str, expected: str | None) -> None:
    assert without_secrets(words.split()) == (expected or words).split()


def test_a_run_folder_has_no_secret_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--wandb-key", "hunter2", "--hub.password=hunter2", "--depth=3"])
    config = RunConfig(run=RunSection(name="r", folder=str(tmp_path)), data=DataSection(train=("d.h5",)))
    RunFolder.create(config, mpidp.init()).close()
    (start,) = json.loads((tmp_path / "r/env.json").read_text())
    assert start["command"] == ["train.py", "--wandb-key", "***", "--hub.password=***", "--depth=3"]
    written = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert written and not any("hunter2" in path.read_text() for path in written)
