"""The exception tree of surefoot.

Every error a user can cause is a `SurefootError`: its text is one line that names the dotted config path or the
file, the offending value and the remedy. The command line prints that line and exits with code 2, without a traceback.

    SurefootError
    ├── ConfigError       a recipe, an override or a saved configuration
    ├── DataError         a corpus, a tokenizer, a shard
    ├── RunError          a run folder, a step that cannot be taken (NaN loss, resume that would alter the run)
    └── CheckpointError   a checkpoint that is damaged, foreign or does not fit
"""

from __future__ import annotations


class SurefootError(Exception):
    """An error whose text is one line written for the user."""


class ConfigError(SurefootError):
    """A configuration value that cannot be used.

    `path` is the dotted path from the root of the configuration, `value` the offending value and `remedy` says what to
    write instead.
    """

    def __init__(self, path: str, value: object, remedy: str) -> None:
        self.path, self.value, self.remedy = path, value, remedy
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{path}: {shown}: {remedy}")


class DataError(SurefootError):
    """Data that is missing, unreadable, damaged or does not fit the model."""


class RunError(SurefootError):
    """A run folder or a training step that cannot be used."""


class CheckpointError(SurefootError):
    """A checkpoint that is damaged, foreign or does not fit."""
