"""What a library writes to standard error in; the same without lines known to mean nothing out."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

# Open MPI tries its UCX component at each window, says this where there is no fast network, and takes another one.
HARMLESS = ("osc_ucx_component.c",)
STDERR = 2


@contextmanager
def without_noise() -> Iterator[None]:
    """Holds back what this process, C libraries included, writes to standard error in the block; then passes it on.

    Only lines that hold one of `HARMLESS`, and the blank lines after them, are dropped.
    """
    with tempfile.TemporaryFile() as held:
        saved = os.dup(STDERR)
        os.dup2(held.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(saved, STDERR)
            os.close(saved)
            held.seek(0)
            os.write(STDERR, without_harmless(held.read()))


def without_harmless(text: bytes) -> bytes:
    """The text without harmless lines and the blank ones that follow them."""
    kept: list[bytes] = []
    dropping = False
    for line in text.splitlines(keepends=True):
        harmless = any(mark.encode() in line for mark in HARMLESS)
        dropping = harmless or (dropping and not line.strip())
        if not dropping:
            kept.append(line)
    return b"".join(kept)
