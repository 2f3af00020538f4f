"""The store that gateways share, with a real redis-server: two stores are two gateways."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from redis import Redis

from gateway.api.feedback import FeedbackStore
from gateway.api.feedback_answers import ACCEPTED_TTL_S
from gateway.api.schema import FeedbackRequest
from gateway.generation.request import RequestContext
from gateway.generation.sessions import Sessions
from gateway.metrics import Metrics
from gateway.middleware.rate_limits import RateLimits
from gateway.pool.quota import OwnerQuota
from gateway.shared_store.connection import SharedStore, SharedStoreAway
from shared.errors import InvalidRequest, NotFound, QuotaExceeded, Superseded
from tests.e2e.harness import free_port, until
from tests.gateway.exposition import total
from tests.gateway.generation.stubs import make_spec
from tests.gateway.jobs.servers import RedisServer, redis_server, volatile_redis
from tests.tls import Certificate

REQUEST_TIMEOUT_S = 2.0
SECRET = "quokkaword"


@dataclass
class Gateway:
    """What a gateway does with its store."""

    url: str
    failures: Counter[str] = field(default_factory=Counter)
    is_started: bool = True

    def __post_init__(self) -> None:
        self.store = SharedStore(self.url, REQUEST_TIMEOUT_S, lambda use: self.failures.update([use]))
        self.metrics = Metrics(dict, lambda: 0)
        self.sessions = Sessions(self.store)
        self.feedback = FeedbackStore(self.metrics, self.store)
        self.limits = RateLimits(shared=self.store)
        self.quota = OwnerQuota(2, self.store)
        if self.is_started:
            self.store.start()

    def is_taken(self, key: str = "key", per_minute: int = 3) -> bool:
        try:
            self.limits.take(key, per_minute)
        except QuotaExceeded:
            return False
        return True

    def report(self, owner: str = "key", **fields: Any) -> None:
        feedback = {"id": "answer", "index": 0, "action": "accepted", "characters": 9, **fields}
        self.feedback.record(owner, msgspec.convert(feedback, FeedbackRequest))


MakeGateway = Callable[..., Gateway]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with volatile_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def make(redis: RedisServer) -> Iterator[MakeGateway]:
    """Makes gateways over an empty store, or over that of another URL."""
    with Redis.from_url(redis.url) as client:
        client.flushall()
    with ExitStack() as stack:

        def started(url: str = redis.url, **options: Any) -> Gateway:
            gateway = Gateway(url, **options)
            stack.callback(gateway.store.stop)
            return gateway

        yield started


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, which it may stop."""
    with volatile_redis(tmp_path) as own:
        yield own


def stored(url: str) -> dict[str, str]:
    """Everything in a store, as text, with the seconds that it will stay."""
    with Redis.from_url(url, decode_responses=True) as client:
        readers: dict[str, Callable[[str], Any]] = {
            "string": client.get,
            "hash": client.hgetall,
            "zset": lambda name: client.zrange(name, 0, -1),
        }
        return {f"{name} {client.ttl(name)}": str(readers[client.type(name)](name)) for name in client.scan_iter()}


# Sessions ------------------------------------------------------------------------------------


def context(session: str | None = "s", owner: str = "key") -> RequestContext:
    return RequestContext(make_spec(session=session, owner=owner))


def test_a_newer_request_at_another_gateway_cancels_the_older(make: MakeGateway) -> None:
    a, b = make(), make()
    older, newer, newest = context(), context(), context()
    with a.sessions.superseding(older), b.sessions.superseding(newer):
        until(lambda: older.is_over, 5, "the message")
        assert isinstance(older.cancel_reason, Superseded)
        with a.sessions.superseding(newest):
            until(lambda: newer.is_over, 5, "the message back")
            time.sleep(0.05)
            assert not newest.is_over


def test_other_sessions_owners_and_ended_requests_are_left_alone(make: MakeGateway) -> None:
    a, b = make(), make()
    first, foreign, none = context("1"), context("2", "other"), context(None)
    with a.sessions.superseding(context("2")):
        pass
    with ExitStack() as stack:
        for gateway, each in ((a, first), (a, foreign), (a, none), (b, context("2")), (b, context(None))):
            stack.enter_context(gateway.sessions.superseding(each))
        time.sleep(0.1)
        assert not any(each.is_over for each in (first, foreign, none))


def test_a_message_on_an_older_request_does_not_cancel_a_newer(make: MakeGateway) -> None:
    """The request at B comes before that at A, but its message after it."""
    a = make(is_started=False)
    b = make()
    with b.sessions.superseding(context()):
        pass
    newest = context()
    with a.sessions.superseding(newest):  # without the store: it could not learn its number
        a.sessions._receive(f"{a.store.name('session', 'key', 's')} 7")
        assert newest.is_over
    a.store.start()
    newest = context()
    with a.sessions.superseding(newest):
        a.sessions._receive(f"{a.store.name('session', 'key', 's')} 1")
        a.sessions._receive("no session")
        assert not newest.is_over


def test_of_many_requests_at_several_gateways_one_remains_at_most(make: MakeGateway) -> None:
    gateways = [make() for _ in range(3)]
    contexts = [context() for _ in range(12)]
    is_checked = threading.Event()

    def hold(number: int) -> None:
        with gateways[number % 3].sessions.superseding(contexts[number]):
            is_checked.wait(10)

    with ThreadPoolExecutor(12) as threads:
        held = [threads.submit(hold, number) for number in range(12)]
        until(lambda: sum(not each.is_over for each in contexts) <= 1, 5, "the others are cancelled")
        is_checked.set()
        for future in held:
            future.result()


# Feedback ------------------------------------------------------------------------------------


def test_feedback_at_another_gateway_finds_the_answer_and_counts_once(make: MakeGateway) -> None:
    a, b = make(), make()
    a.feedback.add_answer("key", "answer", [None, 0.3], 0.07)
    b.report()
    a.report()
    b.report(kept=7)
    a.report(kept=7)
    b.report(index=1, action="ignored")
    assert [total(g.metrics, "tercet_suggestions_total", action="accepted") for g in (a, b)] == [0, 1]
    assert [total(g.metrics, "tercet_saved_characters_total") for g in (a, b)] == [0, 9]
    assert total(b.metrics, "tercet_kept_characters_total") == 7
    assert total(b.metrics, "tercet_predictions_total", action="ignored", up_to_keys="0.5") == 1
    with pytest.raises(NotFound):
        b.report(owner="other")
    with pytest.raises(InvalidRequest, match="index must be below 2"):
        b.report(index=2)
    assert not a.failures
    assert not b.failures


def test_reports_from_many_threads_at_two_gateways_count_once(make: MakeGateway) -> None:
    gateways = [make(), make()]
    gateways[0].feedback.add_answer("key", "answer", [None] * 8, 0.07)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: gateways[number % 2].report(index=number % 8), range(64)))
    assert sum(total(g.metrics, "tercet_suggestions_total", action="accepted") for g in gateways) == 8


# Limits of keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("per_minute", [7, 60, 600])
def test_a_keys_rate_holds_across_gateways(make: MakeGateway, per_minute: int) -> None:
    gateways = [make(), make(), make()]
    started_at = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        taken = threads.map(lambda n: gateways[n % 3].is_taken(per_minute=per_minute), range(per_minute + 60))
        num_taken = sum(taken)
    theory = per_minute + (time.monotonic() - started_at) * per_minute / 60
    assert per_minute <= num_taken <= theory + 1
    assert gateways[0].is_taken("other", per_minute)
    with pytest.raises(QuotaExceeded) as caught:
        gateways[1].limits.take("key", 1)
    assert caught.value.headers["Retry-After"]


@pytest.mark.parametrize("jump_s", [-86_400, -3600, -90, 1, 90, 3600, 86_400])
def test_a_wrong_clock_of_one_gateway_changes_no_keys_rate(
    make: MakeGateway, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    gateways = [make(), make()]
    num_taken = 0
    now, now_ns = time.time, time.time_ns
    for number in range(12):
        with monkeypatch.context() as patch:
            if number % 2:
                patch.setattr(time, "time", lambda: now() + jump_s)
                patch.setattr(time, "time_ns", lambda: now_ns() + jump_s * 10**9)
            num_taken += gateways[number % 2].is_taken(per_minute=10)
    assert num_taken in {10, 11}  # one more in six seconds


def test_a_clock_of_redis_that_goes_back_locks_no_key_out(make: MakeGateway) -> None:
    """After a failover to a machine whose clock is behind, the buckets were last used in the future."""
    gateway = make()
    assert gateway.is_taken(per_minute=10)
    with gateway.store.using("rate") as client:
        name = gateway.store.name("rate", "key")
        state = client.hgetall(name)
        assert state
        client.hset(name, mapping={field: float(value) + 3600e6 for field, value in state.items()})
    assert gateway.is_taken(per_minute=10)


def test_a_keys_concurrency_holds_across_gateways(make: MakeGateway) -> None:
    a, b = make(), make()
    with a.quota.entering("key"), b.quota.entering("key"):
        for gateway in (a, b):
            with pytest.raises(QuotaExceeded, match="2 requests of this API key"), gateway.quota.entering("key"):
                pass
        with b.quota.entering("other"), b.quota.entering(""):
            pass
    with b.quota.entering("key"), b.quota.entering("key"):
        pass


def test_the_leases_of_a_dead_gateway_expire(make: MakeGateway) -> None:
    a, b = make(), make()
    a.store.request_ttl_ms = 300
    dead = [a.quota.entering("key") for _ in range(2)]
    for each in dead:
        each.__enter__()
    with pytest.raises(QuotaExceeded), b.quota.entering("key"):
        pass
    time.sleep(0.35)
    with b.quota.entering("key"):
        pass


# The store itself ----------------------------------------------------------------------------


def test_nothing_readable_is_stored_and_everything_expires(make: MakeGateway, redis: RedisServer) -> None:
    gateway = make()
    owner, session, answer = f"{SECRET}-owner", f"{SECRET}-session", f"{SECRET}-answer"
    gateway.feedback.add_answer(owner, answer, [1.0], 0.1)
    gateway.report(owner=owner, id=answer)
    assert gateway.is_taken(owner)
    with gateway.sessions.superseding(context(session, owner)), gateway.quota.entering(owner):
        found = stored(redis.url)
    kinds = {name.split(":")[1] for name in found}
    assert {"session", "answer", "rate", "leases"} <= kinds
    assert SECRET not in str(found)
    assert all(0 <= int(name.rpartition(" ")[2]) <= ACCEPTED_TTL_S for name in found), found


def test_names_are_salted_with_the_password() -> None:
    plain, salted, other = (
        SharedStore(f"redis://{password}127.0.0.1", 1, print) for password in ("", ":secret@", ":other@")
    )
    assert len({store.name("rate", "key") for store in (plain, salted, other)}) == 3
    assert plain.name("rate", "a", "bc") != plain.name("rate", "ab", "c")


def test_without_redis_each_gateway_counts_for_itself_and_the_store_is_used_again_when_it_is_back(
    make: MakeGateway, server: RedisServer
) -> None:
    with structlog.testing.capture_logs() as logs:
        a, b = make(server.url), make(server.url)
        a.feedback.add_answer("key", "answer", [None], 0.07)
        assert [a.is_taken(), a.is_taken()] == [True, True]
        server.kill()
        started_at = time.monotonic()
        for gateway in (a, b):
            older, newer = context(), context()
            with gateway.sessions.superseding(older), gateway.sessions.superseding(newer):
                assert older.is_over
                assert not newer.is_over
            with gateway.quota.entering("key"), gateway.quota.entering("key"), pytest.raises(QuotaExceeded):
                gateway.quota.entering("key").__enter__()
        assert [a.is_taken(), a.is_taken()] == [True, False]  # it goes on with what it has counted
        assert [b.is_taken(per_minute=1), b.is_taken(per_minute=1)] == [True, False]
        a.report()
        with pytest.raises(NotFound):
            b.report()
        assert time.monotonic() - started_at < 2  # no use waits for the store a second time
        assert set(a.failures) == {"session", "feedback", "rate", "concurrency"}
        server.start()
        until(lambda: a.store.is_reached and b.store.is_reached, 10, "reached again")
        older = context()
        with a.sessions.superseding(older), b.sessions.superseding(context()):
            until(lambda: older.is_over, 5, "the message")
    events = Counter(entry["event"] for entry in logs)
    assert events == {"redis_lost": 2, "redis_reached": 2}
    assert {entry["address"] for entry in logs} == {f"127.0.0.1:{server.port}"}


def test_a_server_that_does_not_answer_is_given_up_after_a_moment(make: MakeGateway, server: RedisServer) -> None:
    gateway = make(server.url)
    server.process.send_signal(19)  # SIGSTOP
    started_at = time.monotonic()
    with pytest.raises(SharedStoreAway), gateway.store.using("rate") as client:
        client.get("x")
    assert time.monotonic() - started_at < 2
    with pytest.raises(SharedStoreAway), gateway.store.using("rate"):
        pass
    server.process.send_signal(18)  # SIGCONT
    until(lambda: gateway.store.is_reached, 10, "reached again")


def test_a_replica_counts_as_lost(make: MakeGateway, server: RedisServer) -> None:
    """It answers reads, and no use of the store is one."""
    gateway = make(server.url)
    with Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", "1")
        assert gateway.is_taken()
        assert gateway.failures["rate"] == 1
        time.sleep(1)
        assert not gateway.store.is_reached
        client.replicaof("NO", "ONE")
    until(lambda: gateway.store.is_reached, 10, "reached again")


def test_a_gateway_starts_without_redis(make: MakeGateway) -> None:
    gateway = make("redis://127.0.0.1:1/0")
    assert not gateway.store.is_reached
    assert gateway.is_taken()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a refused handshake's socket
def test_password_and_tls(make: MakeGateway, tmp_path: Path) -> None:
    certificate, tls_port, authority = Certificate(tmp_path), free_port(), tmp_path / "ca.crt"
    authority.write_bytes(certificate.authority_pem)
    options = {
        "requirepass": "pass:word",
        "tls_port": str(tls_port),
        "tls_cert_file": str(certificate.cert),
        "tls_key_file": str(certificate.key),
        "tls_ca_cert_file": str(certificate.cert),
        "tls_auth_clients": "no",
    }
    with redis_server(tmp_path, **options) as server:
        address = f"127.0.0.1:{tls_port}"
        trusted = make(f"rediss://:pass%3Aword@{address}/0?ssl_ca_certs={authority}")
        assert trusted.store.is_reached
        with structlog.testing.capture_logs() as logs:
            for url in (
                f"rediss://:pass%3Aword@{address}/0",  # the system's authorities
                f"rediss://:wrong@{address}/0?ssl_ca_certs={authority}",
                f"redis://127.0.0.1:{server.port}/0",
            ):
                assert not make(url).store.is_reached
    assert not any(word in str(logs) for word in ("pass:word", "pass%3Aword", ":wrong"))
    assert len(logs) == 3
    gc.collect()  # redis-py leaves it open
