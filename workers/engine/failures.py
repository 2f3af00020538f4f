"""Refusals of a request, and failures of the engine itself. One class for each kind of failure.

A failure carries its kind, which labels its counter and is its code in the protocol, and a sentence that a client may
read. The exception behind it, if there is one, is its `__cause__`, which is logged and never sent. Knows no tensor
library: `foreign_errors` makes failures from the exceptions of others, `failure_policy` says what follows.

    EngineError
    ├── EngineFull, EngineNotReady, InvalidPrompt       a request is refused
    │   └── ContextExceeded
    └── EngineFailure
        ├── OutOfMemory                                 sequences whose own work it was end; fatal if repeated. Where
        │                                               the work was of the whole step: as InvalidOutput
        ├── InvalidOutput                               the step's sequences end, caches are dropped; fatal if repeated
        ├── SequenceFailure                             one sequence ends
        ├── DeviceFailure, Hang, InternalFailure        fatal: the process must end
        │                                               (also of a load, which is not tried again in it)
        ├── LoadFailure                                 the model is not loaded; the engine tries again
        └── EngineStopped                               not a fault: the engine drains, and its time is over
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base of all errors that the engine raises."""


class EngineFull(EngineError):
    """The engine has as many sequences, running and waiting, as it may have."""


class EngineNotReady(EngineError):
    """The engine has no model yet, or accepts no more requests."""


class InvalidPrompt(EngineError, ValueError):
    """This model can never serve the request; the text names the part that is at fault."""


class ContextExceeded(InvalidPrompt):
    """Prompt and new tokens together are more than the model's context."""


class EngineFailure(EngineError):
    """Something failed while the engine worked.

    Attributes:
        kind: label of its counter, and its code in the protocol.
        detail: a sentence for clients and operators, without the text of foreign exceptions.
        is_recoverable: the engine may continue after it.
    """

    kind: ClassVar[str] = "internal_error"
    detail: str = "The worker failed; it is being replaced."
    is_recoverable: ClassVar[bool] = False

    def __init__(self, detail: str | None = None) -> None:
        if detail is not None:
            self.detail = detail
        super().__init__(self.detail)


class OutOfMemory(EngineFailure):
    """The device had no memory for a step."""

    kind = "out_of_memory"
    detail = "The device ran out of memory. Try again."
    is_recoverable = True


class InvalidOutput(EngineFailure):
    """A log-probability is not a finite number, so the logits, and perhaps the cached keys and values, are not."""

    kind = "invalid_output"
    detail = "The model computed values that are not numbers. Try again."
    is_recoverable = True


class SequenceFailure(EngineFailure):
    """A token could not be added to its sequence. No other sequence is affected."""

    kind = "sequence_error"
    detail = "A generated token could not be processed."
    is_recoverable = True


class DeviceFailure(EngineFailure):
    """The device, or its driver, reported an error. It may compute the next step wrongly."""

    kind = "device_error"
    detail = "The device failed; its worker is being replaced."


class Hang(EngineFailure):
    """A step took longer than it may."""

    kind = "hang"
    detail = "The engine did not complete a step in time; its worker is being replaced."


class InternalFailure(EngineFailure):
    """An error of the engine's own code. What it leaves is in an unknown state."""


class LoadFailure(EngineFailure):
    """The model cannot be loaded. The detail says why where that is known, and what to do."""

    kind = "load_error"
    detail = "The model could not be loaded; the worker's log has the reason."
    is_recoverable = True


class EngineStopped(EngineFailure):
    """The engine ended before the sequence did. Not counted."""

    kind = "stopped"
    detail = "The worker is stopping. Try again."
