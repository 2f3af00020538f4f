"""A contender in a process of its own: created there, its methods called there.

Knows process pools. Does not know what the contender does. The process is spawned, not forked: it imports torch itself
and shares no thread pool, allocator or interpreter lock with the benchmark. Contenders read the clock inside their
process, so the round trip of a call is never part of a measurement.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import signal
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from shared.errors import StartError

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ContenderProcess(ProcessPoolExecutor):
    """`ContenderProcess("deploy.tuning.load.clients:Clients", …)` is that object in a spawned process.

    The first call starts the process and creates the object.
    """

    def __init__(self, factory: str, *args: Any) -> None:
        """
        Args:
            factory: "module:name" of a class or function. A name, so that only the new process imports the module.
            args: the factory's arguments; they must be picklable.
        """
        context = multiprocessing.get_context("spawn")
        super().__init__(1, context, initializer=_initialize, initargs=(factory, args))
        self._factory = factory

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the contender and return its result. Arguments and result must be picklable.

        Raises:
            StartError: the method or the factory raised, or the process died. The first line gives the reason, the
                other lines the traceback.
        """
        try:
            return self.submit(_call, method, args).result()
        except BrokenProcessPool as error:
            raise StartError(f"The process of {self._factory} has ended.") from error
        except StartError as error:
            raise StartError(f"{self._factory} failed with {error}") from error


# The rest runs in the contender's process, which holds one contender.
_factory, _args = "", ()
_contender: Any = None


def _initialize(factory: str, args: tuple[Any, ...]) -> None:
    """Ignore Ctrl-C, after which the benchmark closes the pool, and die with the benchmark if it is killed."""
    global _factory, _args
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _factory, _args = factory, args


def _call(method: str, args: tuple[Any, ...]) -> Any:
    """Call the contender's method; create the contender first if it does not exist.

    The contender is created here, not in `_initialize`: a pool drops the reason why an initializer failed.
    """
    global _contender  # noqa: PLW0603
    try:
        if _contender is None:
            module, _, name = _factory.partition(":")
            _contender = getattr(importlib.import_module(module), name)(*_args)
        return getattr(_contender, method)(*args)
    except Exception as error:  # noqa: BLE001 - as text, because not every exception can be pickled
        first_line = str(error).partition("\n")[0]
        raise StartError(f"{type(error).__name__}: {first_line}\n{traceback.format_exc()}") from None
