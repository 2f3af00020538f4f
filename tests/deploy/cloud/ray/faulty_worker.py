"""A worker on Ray for tests: its engine has the faults of `tests.faulty_workers`."""

from __future__ import annotations

from deploy.cloud.ray.replica import WorkerReplica
from shared.plan import Plan
from shared.settings import Settings
from tests.faulty_workers import read_faults
from workers.service import SlotService


class FaultyWorker(WorkerReplica):
    def make_service(self, plan: Plan, settings: Settings) -> SlotService:
        from workers.app import make_service

        return make_service(plan, plan.slots[0], settings, read_faults(plan.slots[0].index))
