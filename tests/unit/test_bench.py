"""`mpidp bench` on one rank: its options, its JSON, its arithmetic, and that a wrong result is never timed."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpidp.cli import main
from mpidp.errors import ConfigError, LaunchError, MpidpError
from mpidp.models.gpt import gpt
from mpidp.options import parse
from mpidp.reduce.buckets import Bucket
from mpidp.reduce.choice import FlatReducer
from mpidp.tools.bench import allreduce, step
from mpidp.tools.bench.options import AllreduceOptions, StepOptions
from mpidp.tools.bench.timing import Side, Times, measure
from mpidp.world.start import init
from mpidp.world.world import World

REPORT_KEYS = {"kind", "ranks", "nodes", "device", "mpi", "torch", "threads", "repeats", "rows"}
TIME_KEYS = {"name", "chosen", "bytes", "median_s", "min_s", "max_s"}


@pytest.fixture(scope="module")
def world() -> World:
    return init()


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformer that takes milliseconds."""
    monkeypatch.setattr(step, "VOCABULARY", 32)
    monkeypatch.setitem(step.MODELS, "transformer", lambda: gpt(vocabulary=32, context=step.CONTEXT, layers=1, width=8))


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run the command and return what its one line says."""
    assert main(["bench", *words, "--json", "--repeats=2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert isinstance(report, dict)
    return report


def test_options_are_words_with_commas() -> None:
    words = ["--bytes=4096,8", "--reducers", "flat,mpi", "--against", "gloo", "--repeats", "3", "--json"]
    assert parse(AllreduceOptions, "mpidp bench allreduce", words) == AllreduceOptions(
        (4096, 8), ("flat", "mpi"), "gloo", 3, True
    )
    assert parse(StepOptions, "mpidp bench step", ["--model=mlp", "--reducers=null"]) == StepOptions("mlp", ("null",))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--repeats=0"], "--repeats=0; expected at least 1"),
        (["--bytes=4096,6"], "--bytes=6; expected a positive multiple of 4"),
        (["--bytes=0"], "--bytes=0; expected a positive"),
        (["--bytes=8,8"], "--bytes=8,8; expected each only once"),
        (["--reducers=flat,mpi,flat"], "--reducers=flat,mpi,flat; expected each only once"),
    ],
)
def test_options_that_cannot_be_used(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse(AllreduceOptions, "mpidp bench allreduce", words)


@pytest.mark.parametrize(("kind", "known"), [("allreduce", "mpi, copy"), ("step", "plain, auto")])
def test_unknown_names_are_told_with_the_known(capsys: pytest.CaptureFixture[str], kind: str, known: str) -> None:
    assert main(["bench", kind, "--reducers=flat,quick"]) == 2
    error = capsys.readouterr().err
    assert "'quick' is not known" in error
    assert known in error


def test_allreduce_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 10: `null` and `naive` are there; the baseline stands beside them."""
    names = ["auto", "null", "naive", "flat", "mpi", "copy"]
    report = run_json(capsys, "allreduce", "--bytes=4096,8", f"--reducers={','.join(names)}", "--against=gloo")
    assert report.keys() == REPORT_KEYS
    assert (report["kind"], report["ranks"], report["nodes"]) == ("allreduce", 1, 1)
    assert [(row["bytes"], row["name"]) for row in report["rows"]] == [
        (num_bytes, name) for num_bytes in (4096, 8) for name in [*names, "gloo"]
    ]
    for row in report["rows"]:
        assert row.keys() == TIME_KEYS | {"calls", "algorithm_bytes_per_s", "bus_bytes_per_s"}
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
    assert report["rows"][0]["chosen"] == "null"


@pytest.mark.usefixtures("small_model")
def test_step_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Behaviour 6, beside the times: every side's gradients are those of plain torch."""
    report = run_json(capsys, "step", "--reducers=plain,null,auto,naive,flat", "--against=ddp")
    assert report.keys() == REPORT_KEYS
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["plain", "null", "auto", "naive", "flat", "ddp"]
    for row in rows.values():
        assert row.keys() == TIME_KEYS | {"reduce_s", "exposed_s", "efficiency"}
    assert (rows["null"]["exposed_s"], rows["null"]["efficiency"]) == (0, 1)
    assert rows["plain"]["reduce_s"] is rows["ddp"]["reduce_s"] is None
    assert 0 < rows["flat"]["reduce_s"] < rows["flat"]["max_s"]


@pytest.mark.usefixtures("small_model")
def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "allreduce", "--bytes=8", "--reducers=auto,copy", "--repeats=1"]) == 0
    heading, _, header, auto, copy = capsys.readouterr().out.splitlines()
    assert heading.startswith("allreduce: 1 rank on 1 node, cpu, ")
    assert header.split()[:2] == ["name", "bytes"]
    assert auto.split()[:3] == ["auto", "(null)", "8"]
    assert copy.split()[-1] == "-"
    assert main(["bench", "step", "--reducers=plain", "--repeats=1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-3:] == ["-", "0.000", "1.000"]


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("kind", ["allreduce", "step"])
@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_wrong_results_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, wrong: float
) -> None:
    """Behaviour 1: a result that is off in one element ends the command with code 1."""

    def mean(self: FlatReducer, bucket: Bucket) -> None:
        bucket.flat[1] += wrong

    monkeypatch.setattr(FlatReducer, "mean", mean)
    assert main(["bench", kind, "--reducers=null,flat", "--repeats=1"]) == 1
    output, error = capsys.readouterr()
    assert output == ""
    assert "Nothing was timed" in error
    assert "flat" in error


def test_a_second_wrong_call_is_found(world: World) -> None:
    """Behaviour 1: "on the first step and the second"."""
    results = iter([True, False])

    def check() -> None:
        if not next(results):
            raise MpidpError("wrong")

    side = Side("lazy", prepare=lambda: None, run=lambda: None, check=check)
    with pytest.raises(MpidpError, match="wrong"):
        measure(world, [side], repeats=1)


def test_sides_take_turns(world: World) -> None:
    """After the checks the sides alternate, each with fresh values and as many calls as it asks for."""
    log: list[str] = []
    sides = [
        Side(
            name,
            prepare=lambda name=name: log.append(name),
            run=lambda name=name: log.append(name.upper()),
            check=log.clear,
            calls=calls,
            meter=lambda: float(len(log)),
        )
        for name, calls in (("a", 1), ("b", 2))
    ]
    times = measure(world, sides, repeats=2)
    assert "".join(log) == "aAbBB" * 2
    assert times["b"].metered_s == [1.0, 1.0]  # a call of each adds one
    assert len(times["a"].seconds) == 2


def test_bandwidths_of_four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of the buffer over the median, and 2 (n - 1) / n of it on the bus; a copy has no bus."""
    times = {name: Times([4.0, 2.0, 1.0], [0.0] * 3) for name in ("mpi", "copy")}
    monkeypatch.setattr(allreduce, "measure", lambda *_: times)
    four: Any = SimpleNamespace(size=4, rank=1, device=torch.device("cpu"), cuda_aware=None)
    rows = allreduce.allreduce_rows(AllreduceOptions((4096,), ("mpi", "copy")), four)
    assert [(row["median_s"], row["min_s"], row["max_s"]) for row in rows] == [(2.0, 1.0, 4.0)] * 2
    assert [row["algorithm_bytes_per_s"] for row in rows] == [2048, 2048]
    assert [row["bus_bytes_per_s"] for row in rows] == [3072, None]


@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize("unreduced", ["null", "plain"])
def test_exposed_time_is_paired(monkeypatch: pytest.MonkeyPatch, world: World, unreduced: str) -> None:
    """A repeat is compared with the same repeat of the baseline: a machine that slows down moves neither figure."""
    times = {unreduced: Times([1.0, 1.0, 9.0], [0.0] * 3), "flat": Times([2.0, 2.0, 10.0], [0.25, 0.5, 0.75])}
    monkeypatch.setattr(step, "measure", lambda *_: times)
    _, flat = step.step_rows(StepOptions(reducers=(unreduced, "flat")), world)
    assert (flat["exposed_s"], flat["efficiency"], flat["reduce_s"]) == (1.0, 0.5, 0.5)


@pytest.mark.usefixtures("small_model")
def test_no_baseline_no_efficiency(world: World) -> None:
    (row,) = step.step_rows(StepOptions(reducers=("flat",), repeats=1), world)
    assert row["exposed_s"] is row["efficiency"] is None


def test_workloads_have_the_stated_sizes_and_leave_the_random_state(world: World) -> None:
    """Targets are for a model of about 21 million parameters."""
    before = torch.get_rng_state()
    modules = {name: step.make_workload(name, 1, world).module for name in step.MODELS}
    assert torch.equal(torch.get_rng_state(), before)
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
    assert sizes == {"transformer": 21_045_248, "mlp": 8_656_128}


@pytest.mark.parametrize(
    "name, text",
    [
        ("127.0.1.1", "and there its name stands for 127.0.1.1"),
        ("", r"and its name cannot be resolved \(no such host\)"),
    ],
)
def test_the_address_of_rank_0(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    def resolve(host: str) -> str:
        if not name:
            raise OSError("no such host")
        return name

    assert allreduce.root_address("node1", {"MASTER_ADDR": "10.0.0.1"}) == "10.0.0.1"
    monkeypatch.setattr(allreduce.socket, "gethostbyname", resolve)
    with pytest.raises(LaunchError, match=f"node1, {text}: set MASTER_ADDR"):
        allreduce.root_address("node1", {})
    monkeypatch.setattr(allreduce.socket, "gethostbyname", lambda host: "10.0.0.2")
    assert allreduce.root_address("node1", {}) == "10.0.0.2"
