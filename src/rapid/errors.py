"""The one tree of errors. Every message names the thing that is wrong and says what to do about it.

The command line prints the message as one line and exits with `exit_code`; no traceback reaches a user.
"""

from __future__ import annotations


class RapidError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 2


class InvalidParameter(RapidError, ValueError):
    """A setting is out of its range, unknown, or contradicts another one."""


class DocumentError(RapidError):
    """A document is missing, unreadable, empty, or holds no text."""


class ModelError(RapidError):
    """A model cannot be found, loaded, or used the way it was asked for."""


class VocabularyMismatch(ModelError):
    """Target and drafter do not share a vocabulary."""


class PromptTooLong(RapidError):
    """A prompt with its answer does not fit the model's window."""


class InvalidLogits(RapidError):
    """A model returned NaN, or no token with a finite logit: the request cannot go on."""

    exit_code = 1


class SessionError(RapidError):
    """A saved session cannot be written, read, or used with these models or documents."""
