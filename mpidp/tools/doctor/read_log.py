"""The output of a job enters, findings leave: known texts in it, each once, with what they mean. Pure."""

import re

from mpidp.tools.doctor.finding import Finding, ok
from mpidp.tools.doctor.known_texts import KNOWN

_SHOWN = 100
_SEARCHED = 10_000  # of a line; patterns take time with its square


def read_log(text: str) -> list[Finding]:
    """Look for known texts, in the order in which they first appear."""
    found: dict[str, Finding] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for known in KNOWN:
            if known.code not in found and re.search(known.pattern, line[:_SEARCHED]):
                what = f"line {number}, {line.strip()[:_SHOWN]!r}: {known.meaning}"
                found[known.code] = Finding(known.level, known.code, what, known.fix)
    if not found:
        return [ok("text", f"none of {len(KNOWN)} known texts of MPI, Slurm, HDF5 and drivers is in it")]
    return list(found.values())
