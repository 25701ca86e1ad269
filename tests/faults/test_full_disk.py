"""Records of a run that a full disk has no room for: said once, with the file, and then as `on_failure` says."""

from pathlib import Path

import pytest
from tiny import make_workplace

from jobs import run_job

TIMEOUT_S = 60.0
MODEL = """
import resource

from own import RANK, Net


class Limited(Net):
    def forward(self, x):
        if RANK == "0":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # once MPI has its memory
        return super().forward(x)
"""


@pytest.mark.parametrize(("on_failure", "ranks"), [("stop", 3), ("warn", 1), ("warn", 3)])
def test_metrics_that_cannot_be_written(tmp_path: Path, on_failure: str, ranks: int) -> None:
    """Behaviour 54: one line that names metrics.jsonl; it ends all ranks, or none."""
    folder = make_workplace(tmp_path)
    (folder / "limited.py").write_text(MODEL)
    words = ["--model.name=limited:Limited", "--log.every_steps=1", "--checkpoint.every_epochs=0"]
    words += [f"--checkpoint.on_failure={on_failure}", "--log.trace_steps=3", "--log.trace_from=1"]
    result = run_job(["-m", "mpidp", "train", "run.toml", *words], ranks, TIMEOUT_S, cwd=folder)
    assert "Traceback" not in result.output
    assert result.output.count("runs/run/metrics.jsonl cannot be written: the file is larger than") == 1, result.output
    lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
    assert lines and all(line.startswith("{") and line.endswith("}") for line in lines)
    if on_failure == "stop":
        assert result.code == 1 and "Trained" not in result.output
    else:
        assert result.code == 0 and "Trained 18 steps" in result.output
        assert "Training goes on, and what cannot be written is left out" in result.output
        assert result.output.count("cannot write the trace runs/run/trace.json") == 1
        assert not (folder / "runs/run/trace.json.new").exists()
