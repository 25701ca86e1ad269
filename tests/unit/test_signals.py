"""Stop signals are noted while they are watched, and do what they did before afterwards (Behaviour 45)."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpidp.world import signals


def test_signals_are_noted_and_given_back() -> None:
    heard: list[int] = []
    signals.unwatch()  # a command that another test ran in this process may watch still
    former = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        for change in (signals.watch, signals.watch):
            change()
            assert signals.received() is None
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGTERM)
        assert signals.received() is signal.SIGUSR2, "the first"
        for change in (signals.unwatch, signals.unwatch):
            change()
            assert signals.received() is None and heard == []
        signal.raise_signal(signal.SIGUSR2)
        assert heard == [signal.SIGUSR2]
    finally:
        signals.unwatch()
        signal.signal(signal.SIGUSR2, former)


def test_another_thread_hears_that_it_cannot() -> None:
    signals.unwatch()
    with ThreadPoolExecutor() as thread, pytest.raises(RuntimeError, match="main thread"):
        thread.submit(signals.watch).result()
