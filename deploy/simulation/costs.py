"""What requests cost: the inputs of the model, kept in a file. Knows no simulation and no measurement."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.errors import StartError


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time in seconds, on a core that nothing else delays.

    Attributes:
        gateway_s: of the gateway, for a request that is answered.
        worker_s: of a worker besides its engine, for a request's branches together.
        client_s: of the clients, if they share the cores; 0 if they are elsewhere.
        waited_share: of the gateway's and the worker's time, what an answer waits for; the rest is spent after it, or
            at the same time on another core.
        superseded_share: of the gateway's and the worker's time, what a superseded request costs.
        prefill_s: of the engine, for a token of a prompt.
        prompt_s: of the engine, for a prompt besides its tokens.
        step_s: of the engine, for a decode step.
        row_s: of the engine, for each row of a decode step.
        change_s: of the engine, for a step before which the batch has changed: it ends a multi-step decode.
        contention: how much longer computing takes, as a share, when all cores are busy.
    """

    gateway_s: float
    worker_s: float
    client_s: float = 0.0
    waited_share: float = 0.6
    superseded_share: float = 0.8
    prefill_s: float
    prompt_s: float = 0.0
    step_s: float
    row_s: float = 0.0
    change_s: float = 0.0
    contention: float = 0.0


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of request.

    Attributes:
        num_branches: its share of a slot's batch.
        prompt_tokens: that no cache has.
        num_rows: of the batch, while it decodes.
        num_steps: decode steps after the prefill.
    """

    num_branches: int = 3
    prompt_tokens: int = 64
    num_rows: int = 3
    num_steps: int = 19


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The input file of a simulation: where its costs come from, and the costs.

    Attributes:
        max_batch: branches in a slot at a time (TERCET_MAX_BATCH).
        queue: branches that wait in a gateway at most (TERCET_QUEUE).
    """

    source: str
    models: str
    num_cores: int
    max_batch: int = 48
    queue: int = 96
    costs: Costs
    fixed: Kind
    key: Kind | None = None
    key_costs: Costs | None = None


def read_inputs(path: Path) -> Inputs:
    """
    Raises:
        StartError: the file is missing, or is not the output of `tercet simulate fit`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Inputs)
    except (OSError, msgspec.DecodeError) as error:
        raise StartError(f"{path}: {error}. `tercet simulate fit` writes such a file.") from error
