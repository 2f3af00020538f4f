"""The models that are served: those of the plan. What the plan does not know of a model that only other machines hold,
the states of its workers say."""

from __future__ import annotations

import threading
import time

import msgspec

from shared.plan import REMOTE, Model, Plan
from shared.protocol import State

# A gateway that starts, in the place of one that was killed for example, has the first state of a worker that can be
# reached well within this time. Requests wait for it; later they are refused at once.
FIRST_STATE_S = 3.0


class ServedModels:
    """Thread-safe: a model is replaced, never changed.

    Attributes:
        names: fixed at the start.
        default: model of a request that names none.
    """

    def __init__(self, plan: Plan) -> None:
        self._models = {model.name: model for model in plan.models}
        self.names = list(dict.fromkeys([slot.model for slot in plan.slots] + [model.name for model in plan.models]))
        self.default = plan.default_model
        self._waits_until = time.monotonic() + FIRST_STATE_S
        self._learned = threading.Condition()

    def all(self) -> list[Model]:
        return list(self._models.values())

    def get(self, name: str) -> Model:
        """The model of this name. Its `n_ctx` is 0 as long as no worker has reported it."""
        return self._models[name]

    def wait_for(self, name: str) -> Model:
        """As `get`. In the first seconds of this process it waits until a worker has reported the model's `n_ctx`."""
        with self._learned:
            self._learned.wait_for(lambda: self._models[name].n_ctx, max(0.0, self._waits_until - time.monotonic()))
        return self._models[name]

    def learn(self, name: str, state: State) -> None:
        """Note what a worker reports of its model. A checkpoint on this machine has been read: nothing is learned."""
        model = self._models.get(name)
        if model is None or model.source != REMOTE or not state.n_ctx:
            return
        if (model.n_ctx, model.vocab_size, model.revision) != (state.n_ctx, state.vocab_size, state.revision):
            known = msgspec.structs.replace(
                model, n_ctx=state.n_ctx, vocab_size=state.vocab_size, revision=state.revision
            )
            with self._learned:
                self._models[name] = known
                self._learned.notify_all()
