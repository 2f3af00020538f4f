"""The options of a run, validated once and passed down. Does not know which benchmark reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.load.workload import Subject, W, Workload
from shared.errors import StartError
from shared.settings import Settings
from workers.checkpoints.resolve import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    models: str = "synthetic:small"  # a value of TERCET_MODELS with one entry
    device: str = "cpu"  # cpu, or cuda for the first GPU
    num_rounds: int = 7
    is_quick: bool = False
    seed: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)  # further settings by lower-case name
    workload: Workload = W

    @property
    def server_settings(self) -> dict[str, str]:
        """The settings of the server under test, except its models."""
        return {"devices": "cpu" if self.device == "cpu" else "cuda:0", **self.settings}

    def load_settings(self) -> Settings:
        """The settings as the server under test loads them.

        Raises:
            StartError: a setting is invalid, or the settings describe more than one worker.
        """
        values = {"models": self.models, **self.server_settings}
        loaded = Settings.load({f"TERCET_{name.upper()}": value for name, value in values.items()})
        if len(loaded.model.models) != 1 or loaded.model.models[0].count != 1 or len(loaded.pool.devices) != 1:
            raise StartError("A benchmark measures one worker: name one model, without a count, and one device.")
        return loaded

    @property
    def num_threads(self) -> int:
        """Compute threads of the only worker on this machine."""
        return self.load_settings().pool.cpu_threads or len(os.sched_getaffinity(0))

    def subject(self) -> Subject:
        """The model under test.

        Raises:
            StartError: the model is not on this machine and cannot be downloaded.
        """
        [spec] = self.load_settings().model.models
        return Subject.of(resolve(spec.name, spec.source))
