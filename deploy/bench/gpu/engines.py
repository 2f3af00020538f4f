"""Engines inside a stage's process, with a device of the context."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from deploy.bench.gpu.context import Context, subject
from deploy.bench.speed.steps import load
from workers.engine.engine import Engine, EngineConfig
from workers.engine.errors import EngineFailure
from workers.engine.loader import LoadedModel
from workers.engine.request import EngineRequest, SequenceOutput

LOAD_S = 60.0
RESULT_S = 60.0


@contextmanager
def running_engine(
    context: Context,
    model: str,
    dtype: str,
    *,
    on_fatal: Callable[[EngineFailure], None] = lambda _failure: None,
    make: Callable[[], LoadedModel] | None = None,
    **config: Any,
) -> Iterator[Engine]:
    """A warm engine, stopped at the end.

    Args:
        make: the model, in place of loading it.
        config: further fields of `EngineConfig`.

    Raises:
        RuntimeError: it does not get warm.
    """
    changed = threading.Condition()

    def announce() -> None:
        with changed:
            changed.notify_all()

    def load_model(_progress: Callable[[float], None]) -> LoadedModel:
        return make() if make is not None else load(subject(model), context.device, dtype)

    engine = Engine(
        EngineConfig(**{"device": context.device, "dtype": dtype, **config}), load_model, on_change=announce,
        on_fatal=on_fatal,
    )  # fmt: skip
    engine.start()
    with changed:
        changed.wait_for(lambda: engine.status().state in {"warm", "failed"}, LOAD_S)
    status = engine.status()
    try:
        if status.state != "warm":
            raise RuntimeError(f"the engine is {status.state}: {status.reason}")
        yield engine
    finally:
        engine.stop(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_together(engine: Engine, requests: Sequence[EngineRequest]) -> list[SequenceOutput]:
    """The outputs of requests that are submitted at once."""
    return [stream.result() for stream in [engine.submit(request) for request in requests]]
