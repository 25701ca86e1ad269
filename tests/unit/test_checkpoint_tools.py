"""`mpidp checkpoint list | verify | export` on runs of this process: texts and exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_states import save
from small_runs import small_net, small_run

from mpidp.cli import main
from mpidp.train.checkpoint.read import load, newest


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("tools"), checkpoint__every_steps=2)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step in (10, 20):
        save(folder, step, {"model": {"weight": torch.ones(3)}, "optimizer": {}, "step": step}, keep=3)
    with (folder / "step_00000020/state.pt").open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\xfe")
    (folder / "step_00000020/rank_00001.pt").unlink()
    return tmp_path / "run"


def test_list(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (run_folder, run_folder / "checkpoints"):
        assert main(["checkpoint", "list", str(place)]) == 0
        text = capsys.readouterr().out
        assert [line.split()[0] for line in text.splitlines()[2:]] == [f"step_{step:08d}" for step in (10, 8, 6)]
        assert text.count("sizes fit") == 3


def test_list_tells_what_sizes_tell(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (damaged / "checkpoints/.partial-step_00000030-x").mkdir()
    assert main(["checkpoint", "list", str(damaged)]) == 0
    text = capsys.readouterr().out
    assert "rank_00001.pt is missing" in text and "step_00000030-x was not finished" in text


def test_verify(run_folder: Path, damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 42: every damaged file is named, and the exit code tells."""
    assert main(["checkpoint", "verify", str(run_folder)]) == 0
    assert capsys.readouterr().out.count(": whole") == 3
    assert main(["checkpoint", "verify", str(damaged)]) == 1
    text = capsys.readouterr().out
    assert "step_00000020: damaged" in text and "step_00000010: whole" in text
    assert "state.pt is damaged" in text and "rank_00001.pt is missing" in text
    assert main(["checkpoint", "verify", str(damaged / "checkpoints/step_00000010")]) == 0
    assert main(["checkpoint", "verify", str(damaged / "checkpoints/latest")]) == 1


@pytest.mark.parametrize("command", ["list", "verify", "export"])
def test_nothing_there(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", command, str(tmp_path / "none")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["checkpoint", command, str(tmp_path)]) == 1
    assert "no step_* folder" in capsys.readouterr().err


def test_export_loads_in_plain_torch(run_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.pt"
    assert main(["checkpoint", "export", str(run_folder), f"--output={output}"]) == 0
    small_net().load_state_dict(torch.load(output, weights_only=True))
    both = tmp_path / "both.pt"
    assert main(["checkpoint", "export", str(run_folder), f"--output={both}", "--optimizer"]) == 0
    content = torch.load(both, weights_only=True)
    model = small_net()
    model.load_state_dict(content["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(content["optimizer"])
    expected = load(newest(run_folder / "checkpoints")[0])["model"]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())


def test_export_as_safetensors(run_folder: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    output = tmp_path / "out.safetensors"
    words = ["checkpoint", "export", str(run_folder), "--format=safetensors"]
    assert main([*words, f"--output={output}"]) == 0
    expected = load(newest(run_folder / "checkpoints")[0])
    small_net().load_state_dict(load_file(output))
    assert main([*words, f"--output={tmp_path / 'both.safetensors'}", "--optimizer"]) == 0
    tensors = load_file(tmp_path / "both.safetensors")
    assert torch.equal(tensors["optimizer.state.0.exp_avg"], expected["optimizer"]["state"][0]["exp_avg"])
    assert torch.equal(tensors["model.0.weight"], expected["model"]["0.weight"])
    with safetensors.safe_open(tmp_path / "both.safetensors", "pt") as file:
        assert file.metadata()["step"] == "10" and '"optimizer.param_groups.0.lr": 0.01' in file.metadata()["optimizer"]


def test_tied_weights_as_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    weight = torch.randn(4, 4)
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 1, {"model": {"a": weight, "b": weight, "c": weight.T}, "step": 1}, keep=1)
    output = tmp_path / "out.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--format=safetensors", f"--output={output}"]) == 0
    tensors = load_file(output)
    assert (
        torch.equal(tensors["a"], weight) and torch.equal(tensors["b"], weight) and torch.equal(tensors["c"], weight.T)
    )


def test_export_passes_over_a_damaged_one_and_overwrites_nothing(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.pt"
    assert main(["checkpoint", "export", str(damaged), f"--output={output}"]) == 0
    text = capsys.readouterr().out
    assert "skipped a newer checkpoint: step_00000020" in text and "step_00000010" in text
    before = output.read_bytes()
    assert main(["checkpoint", "export", str(damaged), f"--output={output}"]) == 2
    assert "exists" in capsys.readouterr().err and output.read_bytes() == before
    chosen = damaged / "checkpoints/step_00000020"
    assert main(["checkpoint", "export", str(chosen), f"--output={tmp_path / 'x'}"]) == 1
    assert main(["checkpoint", "export", str(damaged), f"--output={tmp_path / 'no/such/x'}"]) == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.job
def test_no_mpi_and_no_torch_where_none_is_needed(damaged: Path) -> None:
    """Behaviour 40."""
    code = (
        "import sys; from mpidp.cli import main\n"
        f"main(['checkpoint', 'list', {str(damaged)!r}]); main(['checkpoint', 'verify', {str(damaged)!r}])\n"
        "assert 'torch' not in sys.modules and 'mpi4py' not in sys.modules, 'too much'\n"
        f"main(['checkpoint', 'export', {str(damaged)!r}, '--output={damaged}/m.pt'])\n"
        f"main(['checkpoint', 'export', {str(damaged)!r}, '--optimizer', '--output={damaged}/both.pt'])\n"
        "assert 'mpi4py' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
