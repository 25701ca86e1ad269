"""A neighbour that does not answer: its stack, if it is proven to be the one met at the start (Behaviour 32)."""

import dataclasses
import subprocess
import sys
import time

import pytest

from mpidp.world.status import Address, look_at

ASLEEP = """
import time
from mpidp.world.status import prepare
def asleep():
    time.sleep(600)
address = prepare()
print(address.pid, address.file, address.inode, flush=True)
asleep()
"""


@pytest.mark.job
def test_a_neighbour_tells_its_stack_and_a_stranger_gets_no_signal() -> None:
    """Numbers of processes are given again, and the signal ends whoever has no handler for it."""
    with (
        subprocess.Popen([sys.executable, "-c", ASLEEP], stdout=subprocess.PIPE, text=True) as process,
        subprocess.Popen(["sleep", "600"]) as stranger,
    ):
        try:
            assert process.stdout is not None
            address = Address(*map(int, process.stdout.readline().split()))
            time.sleep(0.2)
            look = look_at(address)
            assert "in asleep" in look.text and not look.is_stopped
            assert "is another one" in look_at(dataclasses.replace(address, inode=address.inode + 1)).text
            look = look_at(dataclasses.replace(address, pid=stranger.pid))
            assert "No such file" in look.text and not look.is_stopped
            assert process.poll() is None and stranger.poll() is None
        finally:
            process.kill()
            stranger.kill()
        process.wait()
        assert "has ended" in look_at(address).text
