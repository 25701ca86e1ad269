"""Loading a state into a plain module, also one that a wrapper saved under its own prefix."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from mpidp.errors import CheckpointError
from mpidp.printable import listed

# DistributedDataParallel and torch.nn.DataParallel save the first, torch.compile the second.
PREFIXES = ("module.", "_orig_mod.")


def load_plain_state(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
) -> Any:
    """Load a state as `module.load_state_dict` does. Not collective.

    If every key begins with the prefix of a wrapper of torch's, and no key of the module does, the prefix is left out:
    a checkpoint of `DistributedDataParallel(model).state_dict()` or of a compiled model loads as it is.

    Args:
        module: takes the state.
        state_dict: by the names of `module.state_dict()`; not changed.
        strict: whether it must have all names of the module and no others.
        assign: put the tensors of `state_dict` in the place of the module's own.

    Returns:
        What `module.load_state_dict` returns: missing and unexpected keys.

    Raises:
        CheckpointError: with `strict=False`, nothing of the state was loaded.
        RuntimeError: what torch raises for names or shapes that do not fit.
    """
    state_dict = _without_prefixes(module, state_dict)
    result = module.load_state_dict(state_dict, strict=strict, assign=assign)
    if not strict and len(result.unexpected_keys) >= len(state_dict):
        raise CheckpointError(
            f"load_state_dict(strict=False) loaded nothing: the state has {listed(state_dict, most=3) or 'no keys'}, "
            f"the model {type(module).__name__} has {listed(module.state_dict(), most=3) or 'no keys'}. Load this "
            f"model's state, or rename its keys "
            f"(torch.nn.modules.utils.consume_prefix_in_state_dict_if_present removes a prefix)."
        )
    return result


def _without_prefixes(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state without wrappers' prefixes that all of its keys have and none of the module's."""
    names = module.state_dict().keys()
    prefix = next((each for each in PREFIXES if state_dict and all(key.startswith(each) for key in state_dict)), None)
    if prefix is None or any(name.startswith(prefix) for name in names):
        return state_dict
    plain = OrderedDict((key.removeprefix(prefix), value) for key, value in state_dict.items())
    # What torch notes of each module, such as the version of its state: "", "module", "module.layer", ...
    notes = getattr(state_dict, "_metadata", {})
    inner = {key.removeprefix(prefix) if key + "." != prefix else "": note for key, note in notes.items() if key}
    plain._metadata = OrderedDict(inner)  # type: ignore[attr-defined]
    return _without_prefixes(module, plain)
