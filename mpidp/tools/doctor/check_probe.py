"""What `--probe` measured enters, findings leave: right values, and speed beside that of a copy. Pure."""

from collections.abc import Mapping
from typing import Any

from mpidp.tools.doctor.finding import Finding, fail, ok, warn
from mpidp.tools.table import size_text

# Allreduce moves every byte a few times; on one node anything slower than this goes by a way that it should not.
SLOW_ALLREDUCE, SLOW_STEP = 50.0, 5.0


def check_measured(measured: Mapping[str, Any], num_nodes: int) -> list[Finding]:
    """Compare with what the machine gave in the same run; across nodes the network is not known, and only named."""
    if "error" in measured:
        text = f"the probe failed: {measured['error']}"
        return [fail("probe", text, "mend that first; mpidp train would stop at the same place")]
    return [*_reduction(measured, num_nodes), *_step(measured, num_nodes), _checkpoint(measured), *_gpu(measured)]


def _reduction(measured: Mapping[str, Any], num_nodes: int) -> list[Finding]:
    ratio = measured["allreduce_s"] / measured["copy_s"]
    size = size_text(measured["num_bytes"])
    if measured["ranks"] == 1:
        return [ok("probe.copy", f"a copy of {size} takes {measured['copy_s'] * 1e3:.1f} ms; one rank reduces nothing")]
    text = (
        f"right values; a copy of {size} takes {measured['copy_s'] * 1e3:.1f} ms, MPI's Allreduce "
        f"{measured['allreduce_s'] * 1e3:.1f} ms ({ratio:.1f} copies)"
    )
    if num_nodes == 1 and ratio > SLOW_ALLREDUCE:
        fix = "look at cores.* and node.copies above; export OMPI_MCA_mpi_yield_when_idle=1 with more ranks than cores"
        return [warn("probe.reduction", text + ": slow for one node", fix)]
    return [ok("probe.reduction", text)]


def _step(measured: Mapping[str, Any], num_nodes: int) -> list[Finding]:
    ratio = measured["step_s"] / measured["plain_step_s"]
    text = (
        f"a training step takes {measured['step_s'] * 1e3:.1f} ms on {measured['device']}, without mpidp "
        f"{measured['plain_step_s'] * 1e3:.1f} ms ({ratio:.2f} times)"
    )
    if num_nodes == 1 and ratio > SLOW_STEP:
        return [warn("probe.step", text, "mpidp bench step --reducers null,naive,flat,node shows which part costs it")]
    return [ok("probe.step", text)]


def _checkpoint(measured: Mapping[str, Any]) -> Finding:
    size = size_text(measured["checkpoint_bytes"])
    return ok(
        "probe.checkpoint",
        f"{size} written and flushed in {measured['save_s'] * 1e3:.0f} ms, checked and loaded in "
        f"{measured['load_s'] * 1e3:.0f} ms, the same values on all ranks",
    )


def _gpu(measured: Mapping[str, Any]) -> list[Finding]:
    if not measured["device"].startswith("cuda"):
        return []
    takes = "takes" if measured["cuda_aware"] else "does not take"
    return [ok("probe.gpu_memory", f"MPI {takes} GPU memory: {measured['aware_reason']}")]
