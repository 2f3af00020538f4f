"""Tokens of a text, from any warm slot of its model: the gateway has no tokenizer of its own.

Needs no room in a slot: the engine takes no part in it. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from gateway.pool.admission import Admission
from gateway.pool.client import BranchError, SlotClient
from shared.errors import NotReady
from shared.protocol import TokenizeResponse

# A worker needs 0.6 s for 1 MiB of text, and may be busy.
TIMEOUT_S = 10.0


class PoolTokenizer:
    """Thread-safe."""

    def __init__(self, admission: Admission, clients: Mapping[int, SlotClient] | Sequence[SlotClient]) -> None:
        """
        Args:
            clients: clients by slot index.
        """
        self._admission = admission
        self._clients = clients

    def tokenize(self, model: str, text: str) -> TokenizeResponse:
        """The tokens of `text`, as the model has them in a prompt. A slot that fails is followed by the next.

        Raises:
            NotReady: no warm slot of the model has answered.
        """
        for row in self._admission.slots():
            if row.slot.model == model and row.state.state == "warm":
                with suppress(BranchError, KeyError):  # a slot of another machine may have been removed
                    return self._clients[row.slot.index].tokenize(text, TIMEOUT_S)
        raise NotReady(f"No slot of {model} is ready to tokenize; try again.")
