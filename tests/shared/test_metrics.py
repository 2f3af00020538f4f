"""The metrics of slots, from their states."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shared.metrics import SlotCollector
from shared.protocol import State


def test_only_slots_with_a_certificate_say_when_it_expires() -> None:
    registry = CollectorRegistry()
    states = [(0, State(state="warm")), (1, State(state="warm", certificate_expires_at=2e9)), (2, State(state="down"))]
    registry.register(SlotCollector(lambda: states))
    found = {
        slot: registry.get_sample_value("tercet_slot_certificate_expiry_seconds", {"slot": slot}) for slot in "012"
    }
    assert found == {"0": None, "1": 2e9, "2": None}
