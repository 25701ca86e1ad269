"""Text and values of any origin, made safe for a message, a terminal or a line of a script.

Names in a data file, in a foreign run folder or in the environment may hold escape sequences of terminals, line breaks,
or bytes that are no text; there may be thousands of them. Pure.
"""

import re
import reprlib
from collections.abc import Iterable

# C0, DEL and C1, Unicode's line ends, and the surrogates that stand for bytes that are not UTF-8.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile("(?![\n\t])" + _CONTROL.pattern)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 240
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 10


def has_control(text: str) -> bool:
    """Whether a text has a line break or another control character, which no script, path or table can hold."""
    return _CONTROL.search(text) is not None


def visible(text: str) -> str:
    r"""The text for a terminal: control characters but line breaks and tabs are written as Python escapes them.

    Example:
        >>> visible("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    return _CONTROL_IN_LINES.sub(lambda found: repr(found[0])[1:-1], text)


def listed(names: Iterable[object], separator: str = ", ", most: int = 10) -> str:
    """The first names, and how many more there are."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def shown(value: object) -> str:
    """`repr` of a value, the middle left out where it is long."""
    return _SHORT.repr(value)
