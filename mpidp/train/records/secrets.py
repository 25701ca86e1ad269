"""The words of a command line enter; the same words without what looks like a secret leave. Pure.

Run folders are shared, and a command line is the last thing that people think of then.
"""

import re
from collections.abc import Sequence

HIDDEN = "***"

_NAME = re.compile(
    r"pass(word|wd|phrase|code)|secret|credential|authori[sz]ation|(^|[^a-z])(auth|bearer)([^a-z]|$)|(token|key)$",
    re.IGNORECASE,
)
_USER_OF_URL = re.compile(r"(?<=://)[^/\s]+(?=@)")  # user:password, or a token alone
_QUERY = re.compile(r"([?&;]([^=&;\s]+)=)[^&;\s#]+")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Replace values of options and variables that are named like secrets, and user names and passwords in URLs.

    Args:
        words: as in `sys.argv`: `--name=VALUE`, `--name VALUE`, `NAME=VALUE`, or anything else.
    """
    hidden: list[str] = []
    is_value_of_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("--")
        if is_value_of_secret and not is_option:
            hidden.append(HIDDEN)
        elif equals and re.fullmatch(r"[\w.-]+", name) and _NAME.search(name):
            hidden.append(f"{name}={HIDDEN}")
        else:
            hidden.append(_QUERY.sub(_hide_query, _USER_OF_URL.sub(HIDDEN, word)))
        is_value_of_secret = word.startswith("-") and not equals and _NAME.search(word) is not None
    return hidden


def _hide_query(found: re.Match[str]) -> str:
    return f"{found[1]}{HIDDEN}" if _NAME.search(found[2]) else found[0]
