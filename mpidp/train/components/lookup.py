"""A name from the run file in, the function it stands for out: a built-in, or the user's own `module:function`."""

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from mpidp.errors import ConfigError
from mpidp.printable import listed, shown


def find(key: str, name: str, built_in: Mapping[str, str]) -> Callable[..., Any]:
    """Resolves a name. A user's own module may lie in the current folder, unless Python is told to be safe (-P).

    Args:
        key: where the name stands in the run file, for messages, e.g. "model.name".
        name: a key of `built_in`, or "module:function".
        built_in: name -> "module:function".

    Raises:
        ConfigError: an unknown name; a module that cannot be imported; a function it does not have.
    """
    place = built_in.get(name, name)
    if ":" not in place:
        close = difflib.get_close_matches(name, built_in, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        known = f" Built in: {listed(built_in)}; or give" if built_in else " Give"
        raise ConfigError(f"{key} = {name!r} is unknown.{hint}{known} module:function.")
    module_name, function_name = place.split(":", 1)
    is_own = name not in built_in
    if is_own and not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")  # a console script, unlike `python -m`, does not look into the current folder
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"{key} = {name!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}. "
            f"It is looked for {_places()}."
        ) from error
    target: Any = module
    for part in function_name.split("."):
        if not hasattr(target, part):
            close = difflib.get_close_matches(part, dir(target), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{key} = {name!r}: module {module_name!r} has no {function_name!r}.{hint}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{key} = {name!r} is a {type(target).__name__}, not something to call.")
    return target  # type: ignore[no-any-return]


def _places() -> str:
    """Where Python looks for modules, in words."""
    if sys.flags.safe_path:
        return "where Python finds packages, not in the current folder (python -P, or PYTHONSAFEPATH is set)"
    return "in the current folder and where Python finds packages"


def call(key: str, function: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """Calls what `find` found; arguments that it does not take, or torch's own refuse, become a ConfigError."""
    try:
        return function(*args, **arguments)
    except (TypeError, ValueError) as error:
        is_torchs = str(getattr(function, "__module__", "")).startswith("torch.") and isinstance(error, ValueError)
        if not is_torchs and (isinstance(error, ValueError) or _takes(function, args, arguments)):
            raise  # a bug inside the function, not in its arguments
        given = listed(f"{name}={shown(value)}" for name, value in arguments.items()) or "none"
        raise ConfigError(f"{key}: {error}. Arguments given: {given}.") from error


def _takes(function: Callable[..., Any], args: tuple[Any, ...], arguments: Mapping[str, Any]) -> bool:
    """Whether the function's signature has room for these arguments; False where it has no signature to look at."""
    try:
        inspect.signature(function).bind(*args, **arguments)
    except (TypeError, ValueError):
        return False
    return True
