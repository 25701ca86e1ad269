"""Text of any origin enters; whether it stays on one line leaves, or the text with its control characters escaped.

Names in a data file, in a foreign run folder or in the environment may hold escape sequences of terminals, line breaks,
or bytes that are no text. Pure.
"""

import re

# C0, DEL and C1, Unicode's line ends, and what stands for a byte that is no UTF-8.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile("(?![\n\t])" + _CONTROL.pattern)


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
