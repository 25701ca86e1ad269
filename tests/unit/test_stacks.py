"""A neighbour that does not answer: its stack, if it is proven to be the one met at the start (Behaviour 32)."""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from mpidp.world.status import Address, look_at

pytestmark = pytest.mark.job

ASLEEP = """
import sys, time
from mpidp.world.status import prepare
def asleep():
    time.sleep(600)
address = prepare()
print(address.pid, address.file, address.inode, flush=True)
asleep()
"""


@pytest.fixture
def neighbour() -> Iterator[tuple[subprocess.Popen[str], Address]]:
    with subprocess.Popen([sys.executable, "-c", ASLEEP], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Address(*map(int, process.stdout.readline().split()))
        process.kill()


def test_it_tells_its_stack(neighbour: tuple[subprocess.Popen[str], Address]) -> None:
    process, address = neighbour
    time.sleep(0.2)
    look = look_at(address)
    assert "in asleep" in look.text and not look.is_stopped
    assert process.poll() is None


def test_another_process_with_its_number_gets_no_signal(neighbour: tuple[subprocess.Popen[str], Address]) -> None:
    """Numbers of processes are given again, and the signal ends whoever has no handler for it."""
    process, address = neighbour
    assert "is another one" in look_at(dataclasses.replace(address, inode=address.inode + 1)).text
    with subprocess.Popen(["sleep", "600"]) as stranger:
        look = look_at(dataclasses.replace(address, pid=stranger.pid))
        assert "No such file" in look.text and not look.is_stopped
        assert stranger.poll() is None
        stranger.kill()
    assert process.poll() is None


def test_one_that_has_ended_is_said_to_have() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert "has ended" in look_at(Address(process.pid, 3, 1)).text
