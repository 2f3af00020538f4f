"""What the requests of all dialects have in common: what to generate, and what to select. Knows no HTTP server."""

from __future__ import annotations

from msgspec import Struct

from gateway.generation.request import GenerationSpec, Prompt
from gateway.generation.request_starter import Caller, document_key, settle_seed
from gateway.generation.selection import SelectionPolicy
from shared.protocol import Sampling

# By this, clients mean a random seed.
RANDOM = -1


def generation_spec(
    request: Struct,
    caller: Caller,
    model: str,
    sampling: Sampling,
    *,
    prompts: tuple[Prompt, ...],
    max_prompt_tokens: int | None,
    num_completions: int,
    deadline: float,
) -> GenerationSpec:
    """What to generate for a parsed request; its dialect replaces what it has beyond this.

    Args:
        request: its `seed`, `session` and `clean` are read, where it has them.
    """
    seed = getattr(request, "seed", None)
    session = getattr(request, "session", None) or caller.session
    return GenerationSpec(
        request_id=caller.request_id,
        model=model,
        prompts=prompts,
        max_prompt_tokens=max_prompt_tokens,
        num_completions=num_completions,
        seed=settle_seed(None if seed == RANDOM else seed),
        sampling=sampling,
        heals=bool(getattr(request, "clean", False)),
        deadline=deadline,
        owner=caller.owner,
        session=session,
        document=document_key(caller.owner, session, prompts[0] if len(prompts) == 1 else ""),
    )


def selection_policy(spec: GenerationSpec, similarity: float, length: int | None = None) -> SelectionPolicy:
    """
    Args:
        similarity: percent from which two completions are near-duplicates.
        length: requested tokens; None: as many as are generated.
    """
    prompt = spec.prompts[0] if len(spec.prompts) == 1 else ""
    return SelectionPolicy(
        prompt=prompt if isinstance(prompt, str) else "",
        num_suggestions=spec.num_branches,
        length=spec.sampling.max_new_tokens if length is None else length,
        similarity=similarity,
        keeps_greedy_text=spec.sampling.temperature == 0,
        is_verbatim=not spec.heals,
        fills_gap=bool(spec.suffix),
    )
