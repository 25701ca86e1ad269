"""A number of pieces in, the order of copies, reductions and waits out. Pure: it can be checked without a GPU.

Three things work at once: the copy engine that brings pieces down to the host, the host that reduces them, and the
copy engine that takes them up again. Two host buffers suffice: while one is being reduced, the other is first emptied
upwards and then filled downwards.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Step:
    """One action on one piece.

    Attributes:
        action: "down" (device to host, on the down stream), "reduce" (on the host, blocking), "up" (host to device, on
            the up stream).
        piece: which piece.
        buffer: which host buffer, 0 or 1.
        after: the step whose end this one waits for, as (action, piece); None for no wait.
    """

    action: Literal["down", "reduce", "up"]
    piece: int
    buffer: int
    after: tuple[str, int] | None


def staged_plan(num_pieces: int) -> list[Step]:
    """The steps in the order in which the host issues them.

    "down" of piece k waits for "up" of piece k - 2, which had the same buffer; "reduce" waits for its "down". "up"
    needs no wait: the host issues it when its reduction has returned.
    """
    steps: list[Step] = []
    for piece in range(num_pieces + 1):
        if piece < num_pieces:
            steps.append(Step("down", piece, piece % 2, ("up", piece - 2) if piece >= 2 else None))
        if piece > 0:
            steps.append(Step("reduce", piece - 1, (piece - 1) % 2, ("down", piece - 1)))
            steps.append(Step("up", piece - 1, (piece - 1) % 2, None))
    return steps
