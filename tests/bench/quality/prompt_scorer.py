"""Log-probabilities of given tokens, from a worker's CPU runner in this process.

Without the engine's thread and its prefix cache, so each prompt is computed from its beginning. Knows token ids; does
not know where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from deploy.load.prompts import tokenizer_of
from shared.errors import StartError
from tests.bench.run import Options
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput

_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0)


class PromptScorer:
    """The model under test, loaded once."""

    def __init__(self, options: Options) -> None:
        """
        Raises:
            StartError: the model is not on this machine and cannot be downloaded.
        """
        # These import torch, which the other benchmarks do without.
        from tests.bench.speed.engine_alone import load
        from workers.engine.cpu.runner import CpuRunner
        from workers.engine.interrupt import Interrupt

        subject = options.subject()
        self.tokenizer = tokenizer_of(subject)
        loaded = load(subject, "cpu", options.settings.get("dtype", "int8"), tokenizer=self.tokenizer)
        self._n_ctx = loaded.config.n_positions
        self._runner = CpuRunner(loaded, 1, Interrupt())

    def logprobs(self, context_ids: Items[int], token_ids: Items[int]) -> list[float]:
        """Natural logarithms of the probability of each of `token_ids`, which follow `context_ids`.

        Raises:
            StartError: together they are longer than the model's context.
        """
        prompt_ids = (*context_ids, *token_ids)
        if len(prompt_ids) >= self._n_ctx:
            raise StartError(
                f"A window and the text after it have {len(prompt_ids)} tokens; this model takes {self._n_ctx - 1}."
            )
        output = self._run(EngineRequest(prompt_ids, _ONE_TOKEN, seed=0, echo_logprobs=True))
        return [logprob for logprob in output.prompt_logprobs[len(context_ids) :] if logprob is not None]

    def _run(self, request: EngineRequest) -> SequenceOutput:
        from workers.engine.core import EngineCore
        from workers.engine.result_stream import ResultStream
        from workers.engine.scheduler import Scheduler
        from workers.engine.sequence import Sequence

        core = EngineCore(Scheduler(self._runner.num_entries, 1), self._runner, eos_id=None)
        stream = ResultStream()
        core.scheduler.add(Sequence(request, stream, start_id=0, healing=None))
        while core.scheduler.sequences:
            core.step()
        return stream.result()
