"""Memory that does not suffice for one request's own work on a GPU. Here the CUDA runner on a CPU, without capture, and
functions of torch that fail as they do where the memory is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.workers.engine.helpers import add, load_peaked, make_core, run_to_end
from workers.engine import sampling
from workers.engine.core import EngineCore
from workers.engine.cuda.runner import CudaRunner
from workers.engine.failures import OutOfMemory
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput
from workers.engine.sequence import ResultStream

MODEL = load_peaked("cpu:0")
MARKER = 500  # no healthy prompt of these tests has this token


class FullMemory(TorchFunctionMode):
    """Calls of torch for which `is_too_large` holds fail."""

    def __init__(
        self, is_too_large: Callable[[str, tuple[Any, ...]], bool], error: type[RuntimeError] = torch.OutOfMemoryError
    ) -> None:
        super().__init__()
        self._is_too_large, self._error = is_too_large, error
        self.num_failures = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_too_large(getattr(func, "__name__", ""), args):
            self.num_failures += 1
            raise self._error("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


def is_marked_prefill(name: str, args: tuple[Any, ...]) -> bool:
    """The upload of a chunk of prompt tokens, one of which is the marker."""
    return name in {"copy_", "tensor"} and any(
        isinstance(arg, torch.Tensor) and arg.dtype == torch.long and arg.dim() == 2 and bool((arg[0] == MARKER).any())
        for arg in args
    )


def make() -> EngineCore:
    return make_core(CudaRunner(MODEL, 6), 6)


def submit(core: EngineCore, prompt: tuple[int, ...], seed: int = 0, **sampling: Any) -> ResultStream:
    return add(core, EngineRequest(prompt, SamplingParams(12, **sampling), seed))


def alone(prompt: tuple[int, ...], seed: int, **sampling: Any) -> SequenceOutput:
    core = make()
    stream = submit(core, prompt, seed, **sampling)
    run_to_end(core)
    return stream.result()


def test_a_prefill_without_memory_fails_its_siblings_and_nothing_else() -> None:
    core = make()
    mate = submit(core, (7, 8), 1)
    for _ in range(3):
        core.step()
    prompt = (MARKER, *range(40))
    victims = [submit(core, prompt, seed) for seed in range(2)]
    late = submit(core, (9, 9, 9), 2)
    with FullMemory(is_marked_prefill) as memory:
        while core.scheduler.sequences:
            timing = core.step()
            assert timing is not None
            if timing.failures:
                break
    assert memory.num_failures == 2  # with the other prompt, then alone
    assert [type(victim.result().failure) for victim in victims] == [OutOfMemory] * 2
    again = submit(core, prompt, 0)
    run_to_end(core)
    assert mate.result().token_ids == alone((7, 8), 1).token_ids
    assert late.result().token_ids == alone((9, 9, 9), 2).token_ids
    assert again.result().cached_tokens == 0
    assert again.result().token_ids == alone(prompt, 0).token_ids


def test_an_echo_without_memory_fails_its_request_and_nothing_else() -> None:
    core = make()
    mate = submit(core, (7, 8), 1)
    victim = add(core, EngineRequest(tuple(range(30)), SamplingParams(12), 3, echo_logprobs=True))
    with FullMemory(lambda name, args: name == "logsumexp" and args[0].dim() == 2 and len(args[0]) >= 29):
        run_to_end(core)
    assert isinstance(victim.result().failure, OutOfMemory)
    assert mate.result().token_ids == alone((7, 8), 1).token_ids


@pytest.mark.parametrize("position", [0, 1], ids=["first token", "later token"])
def test_a_draw_without_memory_fails_its_sequence_and_nothing_else(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences with penalties are drawn together on the host; the memory does for each of them but one."""
    penalized: dict[str, Any] = {"repetition_penalty": 1.3}
    core = make()
    mates = [submit(core, (7, 8), 1), submit(core, (5, 6), 2, **penalized)]
    victim = submit(core, (9, 9, 9), 3, **penalized)

    def sample(logits: Any, draws: Any) -> Any:
        if any(draw.seed == 3 and draw.position >= position for draw in draws):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sampling.sample(logits, draws)

    monkeypatch.setattr("workers.engine.cuda.runner.sample", sample)
    run_to_end(core)
    assert isinstance(victim.result().failure, OutOfMemory)
    assert len(victim.result().token_ids) == position
    assert mates[0].result().token_ids == alone((7, 8), 1).token_ids
    assert mates[1].result().token_ids == alone((5, 6), 2, **penalized).token_ids


def test_another_error_in_a_prefill_fails_the_step() -> None:
    core = make()
    submit(core, (MARKER, 1, 2))
    with FullMemory(is_marked_prefill, torch.AcceleratorError), pytest.raises(torch.AcceleratorError):
        run_to_end(core)
