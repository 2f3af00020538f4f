"""One state made of the reports of many workers and ingresses; and which worker remembers a document."""

from __future__ import annotations

from collections import Counter

import pytest

from deploy.cloud.ray.config import parse_config
from deploy.cloud.ray.pool_state import MEMORY_S, REPORT_SILENCE_S, SILENCE_S, IngressLoad, PoolState, preferred
from shared.errors import StartError
from shared.protocol import State

WARM = State(
    state="warm",
    model="small",
    device="cpu",
    revision="r",
    max_batch=4,
    n_ctx=1024,
    vocab_size=8,
    in_flight=1,
    ms_per_token=10.0,
    memory_bytes=100,
    pid=7,
    age=3,
    counters={"generated_tokens": 5.0},
)
LOADING = State(state="loading", model="small", device="cpu", progress=0.5, max_batch=4, memory_bytes=50)


def test_warm_workers_add_up_and_others_do_not() -> None:
    pool = PoolState()
    pool.report_worker("a", WARM, 0.0)
    pool.report_worker("b", WARM, 0.0)
    pool.report_worker("c", LOADING, 0.0)
    state = pool.state("small", 1.0)
    assert (state.state, state.max_batch, state.in_flight, state.num_replicas) == ("warm", 8, 2, 2)
    assert (state.n_ctx, state.vocab_size, state.ms_per_token, state.memory_bytes) == (1024, 8, 10.0, 250)
    assert (state.pid, state.age, state.counters) == (0, 0, {"generated_tokens": 10.0})


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["loading", "failed"], "loading"),
        (["failed", "draining"], "failed"),
        (["warm", "failed"], "warm"),
        ([], "starting"),
    ],
)
def test_a_pool_is_warm_as_soon_as_one_worker_is(states: list[str], expected: str) -> None:
    pool = PoolState()
    for index, name in enumerate(states):
        pool.report_worker(str(index), State(state=name, model="small", max_batch=4), 0.0)  # type: ignore[arg-type]
    assert (pool.state("small", 0.0).state, pool.state("small", 0.0).model) == (expected, "small")


def test_a_worker_that_reports_no_more_does_not_count_and_different_weights_are_a_revision_of_their_own() -> None:
    pool = PoolState()
    pool.report_worker("a", WARM, 0.0)
    pool.report_worker("b", State(state="warm", model="small", revision="q", max_batch=4), REPORT_SILENCE_S)
    assert pool.state("small", REPORT_SILENCE_S).revision == "q+r"
    assert (
        pool.state("small", REPORT_SILENCE_S + 1).max_batch,
        pool.state("small", REPORT_SILENCE_S + 1).revision,
    ) == (4, "q")
    assert pool.state("small", 2 * REPORT_SILENCE_S + 1).state == "starting"


def test_a_pool_is_full_when_the_ingresses_together_fill_its_workers() -> None:
    pool = PoolState()
    assert not pool.is_full(0.0)  # nothing is known yet
    pool.report_worker("a", WARM, 0.0)
    pool.report_ingress("x", IngressLoad(num_streams=1, num_running=2), 0.0)
    assert not pool.is_full(0.0)
    pool.report_ingress("y", IngressLoad(num_streams=2, num_running=2), 0.0)
    assert pool.is_full(0.0)
    assert pool.state("small", 0.0).num_gateways == 3


def test_a_worker_that_has_fallen_silent_has_no_room() -> None:
    """Else branches would wait in vain for the room of a node that is lost, instead of being refused."""
    pool = PoolState()
    pool.report_worker("lost", WARM, 0.0)
    pool.report_worker("kept", WARM, 2.0)
    pool.report_ingress("x", IngressLoad(num_streams=1, num_running=WARM.max_batch), 2.0)
    assert not pool.is_full(2.0)
    assert pool.is_full(2.5)
    assert pool.state("small", 2.5).max_batch == 2 * WARM.max_batch  # its branches may still end


def test_a_document_stays_where_it_is_when_another_worker_comes() -> None:
    keys = [f"document {number}" for number in range(900)]
    before = {key: preferred(key, ["a", "b"]) for key in keys}
    after = {key: preferred(key, ["a", "b", "c"]) for key in keys}
    assert all(after[key] in {before[key], "c"} for key in keys)
    assert min(Counter(after.values()).values()) > 200


def test_a_worker_that_has_fallen_silent_is_known_until_ray_has_found_it() -> None:
    pool = PoolState()
    pool.report_worker("a", WARM, 0.0)
    now = SILENCE_S + 0.1
    pool.report_worker("b", WARM, now)
    assert pool.silent(now) == frozenset({"a"})
    assert not pool.is_silent("c", now)
    pool.report_worker("a", WARM, now)
    assert not pool.silent(now)
    assert pool.state("small", now + MEMORY_S).state == "starting"
    assert pool.is_silent("a", now + MEMORY_S)
    pool.state("small", now + MEMORY_S + 1)
    assert not pool.is_silent("a", now + MEMORY_S + 1)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "model"),
        ({"model": "small", "num_gpu": 1}, "num_gpu"),
        ({"model": "small", "num_gpus": 2}, "num_gpus"),
        ({"model": "small", "min_workers": 3, "max_workers": 2}, "max_workers=2"),
    ],
)
def test_a_wrong_argument_is_named(args: dict[str, object], words: str) -> None:
    with pytest.raises(StartError, match=words):
        parse_config(args)
