"""Installs the stand-in for `torch.cuda` in this process when it imports torch; see `fake_cuda.process_environment`.

Python imports this module at its start if its directory is in PYTHONPATH. It imports nothing but the standard library:
a process that does not import torch must not do so because of the stand-in.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _TorchFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            from tests.workers.engine.cuda.fake_cuda import FakeCuda, install

            install(FakeCuda())

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


if "FAKE_CUDA" in os.environ:
    sys.meta_path.insert(0, _TorchFinder())
