"""The errors of this package that a user can act on; all derive from `MpidpError`."""

# Attribute of an exception that every rank raises at the same point; see `World.raise_on_all_ranks`.
SHARED_MARK = "mpidp_on_all_ranks"


class MpidpError(ValueError):
    """An error that the user can act on; its text says what is wrong, where, what was found and what to do."""


def marked(error: Exception, note: str = "") -> Exception:
    """Return an exception, marked as one that every rank raises, with a note that says where it happened."""
    if note:
        error.add_note(note)
    setattr(error, SHARED_MARK, True)
    return error


class ConfigError(MpidpError):
    """A run file or command line that cannot be used."""


class DataError(MpidpError):
    """A file, dataset or batch that cannot be used."""


class LaunchError(MpidpError):
    """The job was started in a way that cannot work: size, thread level, devices."""


class MismatchError(MpidpError):
    """Ranks that should agree do not: models, options, configurations."""


class CheckpointError(MpidpError):
    """A checkpoint that is missing, damaged or belongs to something else."""


class RecordError(MpidpError):
    """A small file of a run, such as env.json, that is damaged."""
