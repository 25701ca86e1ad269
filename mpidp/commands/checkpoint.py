"""`mpidp checkpoint`: list, verify and export, without MPI."""

from mpidp.commands.words import DONE, FAILED, dispatch, parsed, say, speaks

USAGE_TEXT = """usage: mpidp checkpoint COMMAND RUN_FOLDER

Look after the checkpoints of a run: its folder, its checkpoints folder, or one checkpoint. Starts no MPI.

commands:
  list RUN_FOLDER         names, times, sizes
  verify RUN_FOLDER       compare every file with its checksum; exit code 1 names what is damaged
  export RUN_FOLDER [--output FILE] [--format torch|safetensors] [--optimizer]
                          write the model of the newest whole one as a file for other programs"""


def checkpoint(words: list[str]) -> int:
    """Run one of them."""
    if not speaks():
        return DONE  # one process answers for all
    return dispatch(words, {"list": _list, "verify": _verify, "export": _export}, "mpidp checkpoint", USAGE_TEXT)


def _list(words: list[str]) -> int:
    from mpidp.tools import checkpoint as options
    from mpidp.tools.checkpoint import list_checkpoints

    chosen = parsed(lambda: options.parse(options.ListOptions, words))
    say(list_checkpoints(chosen.place))
    return DONE


def _verify(words: list[str]) -> int:
    from mpidp.tools import checkpoint as options
    from mpidp.tools.checkpoint import verify

    chosen = parsed(lambda: options.parse(options.VerifyOptions, words))
    text, is_whole = verify(chosen.place)
    say(text)
    return DONE if is_whole else FAILED


def _export(words: list[str]) -> int:
    from mpidp.tools import checkpoint as options
    from mpidp.tools.checkpoint import export

    chosen = parsed(lambda: options.parse(options.ExportOptions, words))
    say(export(chosen.place, chosen.output, chosen.format, chosen.optimizer))
    return DONE
