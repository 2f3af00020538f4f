"""Counts the kernels that code launches: aten operations that compute or copy, and launches that are declared.

On a CPU, so an aten operation counts as one kernel, also where a GPU takes several for it (`topk`, a product that is
split along K). Operations that only make a view, or allocate, count as none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.engine.cuda.step_kernels import TorchKernels
from workers.engine.model.gpt2 import Norm

# Launches of each function of `StepKernels`, as Triton kernels: a draw first reduces blocks of the vocabulary.
LAUNCHES = {"begin": 1, "add_norm": 1, "attend": 1, "draw": 2}


class KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is active, in this thread.

    Attributes:
        counts: kernels, by the name of the operation or function.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._is_paused and _is_kernel(func, (args, kwargs), out):
            self.counts[func._schema.name] += 1
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing meanwhile."""
        before, self._is_paused = self._is_paused, True
        yield
        self._is_paused = before

    def uncounted(self, function: Callable[..., Any], name: str = "", launches: int = 0) -> Callable[..., Any]:
        """`function`, whose operations are not counted, but `launches` of `name` for each call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if launches and not self._is_paused:
                self.counts[name] += launches
            with self.paused():
                return function(*args, **kwargs)

        return call


class CountingKernels(TorchKernels):
    """`StepKernels` whose calls count as the launches of kernels made for them."""

    def __init__(self, length: int, counter: KernelCounter) -> None:
        super().__init__(length)
        self._counter = counter

    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor) -> tuple[Tensor, Tensor]:
        return self._launch("begin", table, token_embedding, position_embedding)  # type: ignore[no-any-return]

    def add_norm(self, x: Tensor, y: Tensor | None, norm: Norm) -> Tensor:
        return self._launch("add_norm", x, y, norm)  # type: ignore[no-any-return]

    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        return self._launch("attend", qkv, slots, integers)  # type: ignore[no-any-return]

    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        return self._launch("draw", logits, table)  # type: ignore[no-any-return]

    def _launch(self, name: str, *args: Any) -> Any:
        function = getattr(super(), name)
        return self._counter.uncounted(function, name, LAUNCHES[name])(*args)


def _is_kernel(func: Any, arguments: Any, out: Any) -> bool:
    name = func._schema.name
    if name.startswith(("aten::empty", "aten::new_empty")):
        return False
    if func._schema.is_mutable:
        return name not in {"aten::detach_", "aten::set_", "aten::resize_"}
    known = {_storage(one) for one in torch.utils._pytree.tree_leaves(arguments) if isinstance(one, Tensor)}
    made = out if isinstance(out, tuple | list) else [out]
    return any(isinstance(one, Tensor) and _storage(one) not in known for one in made)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
