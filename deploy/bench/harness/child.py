"""A contender in a process of its own, called method by method.

Knows pipes. Refuses to know what the contender does. The process is spawned, not forked: it imports torch itself,
and nothing of the caller's threads or memory comes along.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from shared.errors import StartError

STOP_S = 10.0


class Child:
    """`Child("deploy.bench.speed.engine:EngineAlone", …)` is that object elsewhere; `call` calls its methods.

    The process is started, and the object made, by the first call.
    """

    def __init__(self, factory: str, *args: Any) -> None:
        self._factory = factory
        self._args = args
        self._process: BaseProcess | None = None

    def call(self, method: str, *args: Any) -> Any:
        """What the method returns.

        Raises:
            StartError: it raised, the object could not be made, or the process is gone. The first line says why, the
                others are the traceback.
        """
        if self._process is None:
            self._start()
        self._send((method, args))
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._pipe.close()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, self._factory, self._args), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def _send(self, message: object) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._gone() from error

    def _answer(self) -> Any:
        try:
            is_good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if not is_good:
            raise StartError(f"{self._factory} failed with {value}")
        return value

    def _gone(self) -> StartError:
        assert self._process is not None
        self._process.join(STOP_S)
        return StartError(f"{self._factory} ended with exit code {self._process.exitcode}.")


def _live(pipe: Connection, factory: str, args: tuple[Any, ...]) -> None:
    """The child's life: make the object, answer calls, end when the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, who closes the pipe
    module, _, name = factory.partition(":")
    subject = None
    try:
        while True:
            try:
                if subject is None:
                    subject, answer = getattr(importlib.import_module(module), name)(*args), None
                else:
                    method, arguments = pipe.recv()
                    answer = getattr(subject, method)(*arguments)
            except EOFError:
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller must hear of it
                first_line = str(error).partition("\n")[0]
                pipe.send((False, f"{type(error).__name__}: {first_line}\n{traceback.format_exc()}"))
                if subject is None:
                    return
            else:
                pipe.send((True, answer))
    except BrokenPipeError:  # the caller is gone
        return
