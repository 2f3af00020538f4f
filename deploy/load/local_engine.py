"""A warm engine in this process, for what needs no server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.load.options import Options
from workers.checkpoints.resolve import resolve
from workers.codec import Codec
from workers.text.token_healing import TokenHealing
from workers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workers.engine.engine import Engine

MAX_WRITERS = 16  # contexts that the engine gets at once
MAX_BRANCHES = 8  # of a request


@contextmanager
def running_engine(options: Options) -> Iterator[tuple[Engine, Codec]]:
    """A warm engine in this process, with room for `MAX_WRITERS` requests of `MAX_BRANCHES` branches."""
    from workers.engine.engine import Engine, EngineConfig  # imports torch, which the gateway's source does without
    from workers.engine.loader import load_model

    [spec] = options.load_settings().model.models
    checkpoint = resolve(spec.name, spec.source)
    directory = Path(checkpoint.directory)
    tokenizer = Tokenizer.from_directory(directory, checkpoint.vocab_size)
    loaded = load_model(directory, dtype=options.settings.get("dtype", "int8"), tokenizer=tokenizer)
    fatal: list[BaseException] = []
    config = EngineConfig(max_batch=MAX_WRITERS * MAX_BRANCHES, num_threads=options.num_threads, hang_s=0)
    engine = Engine(config, lambda _: loaded, on_fatal=fatal.append)
    engine.start()
    while engine.status().state not in {"warm", "failed"}:
        time.sleep(0.01)
    try:
        yield engine, Codec(TokenHealing(tokenizer), loaded.config.n_positions)
    finally:
        engine.stop(0)
