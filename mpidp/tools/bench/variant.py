"""A name such as `flat/bf16/overlap` enters, a reducer with its wire and overlap leaves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpidp.errors import ConfigError

WIRES = ("bf16", "fp16")
OVERLAPS = {"overlap": True, "after": False}
# Half a unit in the last place, twice: when a number is sent, and for the mean.
ROUNDING = {"full": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10}


@dataclass(frozen=True)
class Variant:
    """One way to reduce, as a benchmark's row is called."""

    reducer: str
    wire: str = "full"
    overlap: bool | None = None

    @property
    def tolerance(self) -> float:
        """What rounding on the wire may change, as a share of the largest contribution."""
        return ROUNDING[self.wire]


def parse_variant(name: str, known: Sequence[str]) -> Variant:
    """Reads REDUCER[/bf16|/fp16][/overlap|/after].

    Raises:
        ConfigError: a part that is not known.
    """
    reducer, *parts = name.split("/")
    wires = [part for part in parts if part in WIRES]
    overlaps = [OVERLAPS[part] for part in parts if part in OVERLAPS]
    if reducer not in known or len(wires) > 1 or len(overlaps) > 1 or len(wires) + len(overlaps) < len(parts):
        raise ConfigError(
            f"--reducers: {name!r} is not known. Known: {', '.join(known)}; behind a reducer /bf16 or /fp16 for "
            f"the wire, and /overlap or /after (backward) for when it works."
        )
    return Variant(reducer, wires[0] if wires else "full", overlaps[0] if overlaps else None)
