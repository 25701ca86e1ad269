"""MPI library and GPU in, one answer out: may MPI be given device pointers? Proven by value, in a child process.

A library that is not CUDA-aware crashes on a device pointer, or worse, copies garbage. So the library's own word is
only a hint; what counts is an Allreduce on device memory whose result was looked at. It runs in a child, whose crash
costs nothing.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpidp.errors import LaunchError
from mpidp.world.launch import without_launcher

PROBE_TIMEOUT_S = 60.0
OVERRIDE = "MPIDP_CUDA_AWARE"


@dataclass(frozen=True)
class Awareness:
    """Whether device pointers may be given to MPI, and why."""

    aware: bool
    reason: str


def decide(environment: Mapping[str, str], hint: bool | None, probe: Callable[[], str | None]) -> Awareness:
    """The decision, apart from how its facts are found.

    Args:
        environment: `MPIDP_CUDA_AWARE=0` or `1` overrides everything.
        hint: what the library says of itself; None when it has no such query.
        probe: runs the proof; returns None when it passed, else what went wrong. Not called when the hint is False.

    Raises:
        LaunchError: the override is neither 0 nor 1.
    """
    override = environment.get(OVERRIDE)
    if override is not None:
        if override not in ("0", "1"):
            raise LaunchError(f"{OVERRIDE}={override!r}: allowed are 0 (never give MPI device memory) and 1 (always).")
        return Awareness(override == "1", f"set by {OVERRIDE}={override}")
    if hint is False:
        return Awareness(False, "the MPI library says that it does not support device memory")
    failure = probe()
    if failure is None:
        return Awareness(True, "an Allreduce on device memory gave the right result in a child process")
    return Awareness(False, f"the test on device memory failed in a child process: {failure}")


def probe_in_child(device: str) -> str | None:
    """Runs `python -m mpidp.world.probe DEVICE` as a world of its own; None when it passed, else what went wrong."""
    command = [sys.executable, "-m", "mpidp.world.probe", device]
    environment = without_launcher(os.environ)
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    if result.returncode == 0:
        return None
    last_lines = " | ".join(result.stderr.strip().splitlines()[-2:])
    return f"exit code {result.returncode}: {last_lines or 'no message'}"
