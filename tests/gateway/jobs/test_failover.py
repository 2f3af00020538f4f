"""Redis after a failover: the next try finds the new primary, without a restart. With real servers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from redis import Redis

from gateway.jobs.redis_store import RedisStore
from gateway.jobs.store import Job
from shared.errors import JobsUnavailable
from tests.e2e.harness import free_port, until
from tests.gateway.jobs.failover import SwitchingProxy, fail_over, sentinel, switching_proxy
from tests.gateway.jobs.servers import RedisServer, redis_server, volatile_redis
from tests.tls import Certificate

NUM_CONNECTIONS = 6
READONLY = b"READONLY You can't write against a read only replica."
# How servers answer that are, or were until a moment ago, something else than a primary.
ANSWERS = [
    b"-" + READONLY,
    b"-LOADING Redis is loading the dataset in memory",
    b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    b"-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    b"-ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -" + READONLY,  # Redis before 7
    b":that is no number",  # no Redis answers so, and redis-py raises no error of its own
    b"*2\r\n:1\r\n:2",
]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    with ExitStack() as stack:
        paths = [tmp_path / name for name in "ab"]
        for path in paths:
            path.mkdir()
        first, second = (stack.enter_context(volatile_redis(path)) for path in paths)
        yield first, second


@pytest.fixture
def proxy(servers: tuple[RedisServer, RedisServer]) -> Iterator[SwitchingProxy]:
    with switching_proxy(servers[0].port) as proxy:
        yield proxy


def make_job(number: int) -> Job:
    return Job(id=f"{number:032}", owner="o", state="queued", created_at=0.0, due_at=0.0, expires_at=9e9)


def swap(servers: tuple[RedisServer, RedisServer]) -> None:
    """Make the second server the primary of the first."""
    first, second = servers
    with Redis(port=first.port) as client:
        client.replicaof("127.0.0.1", str(second.port))


def open_connections(store: RedisStore) -> None:
    """Have the store hold idle connections, as after requests at the same time."""
    pool = store._redis.connection_pool
    held = [pool.get_connection() for _ in range(NUM_CONNECTIONS)]
    for connection in held:
        pool.release(connection)


def count_failures(store: RedisStore, num_jobs: int = 2 * NUM_CONNECTIONS) -> int:
    """Insert and read jobs one after another."""
    failures = 0
    for number in range(num_jobs):
        job = make_job(number)
        try:
            assert store.insert(job)
            assert store.read(job.id) == job
        except JobsUnavailable:
            failures += 1
    return failures


@pytest.fixture
def jobs(proxy: SwitchingProxy) -> Iterator[RedisStore]:
    store = RedisStore(f"redis://127.0.0.1:{proxy.port}/0")
    assert store.insert(make_job(10**6))
    open_connections(store)
    yield store
    store.close()


def test_jobs_follow_a_demoted_primary_to_the_new_one(
    servers: tuple[RedisServer, RedisServer], proxy: SwitchingProxy, jobs: RedisStore
) -> None:
    swap(servers)
    proxy.fail_over(servers[1].port)
    assert count_failures(jobs) == 0


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.split()[0].decode())
def test_jobs_leave_a_server_that_is_no_primary(
    servers: tuple[RedisServer, RedisServer], proxy: SwitchingProxy, jobs: RedisStore, answer: bytes
) -> None:
    proxy.fail_over(servers[1].port, answer)
    assert count_failures(jobs) <= 1


def test_jobs_survive_the_reset_of_all_connections(
    servers: tuple[RedisServer, RedisServer], proxy: SwitchingProxy, jobs: RedisStore
) -> None:
    servers[0].kill()
    proxy.fail_over(servers[1].port)
    proxy.reset()
    assert count_failures(jobs) <= 1


def test_jobs_are_refused_while_there_is_no_primary_and_served_again_after(
    servers: tuple[RedisServer, RedisServer], proxy: SwitchingProxy, jobs: RedisStore
) -> None:
    swap(servers)
    assert count_failures(jobs, 3) == 3  # the proxy still leads to the replica
    proxy.fail_over(servers[1].port)
    assert count_failures(jobs) <= 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a refused handshake's socket
def test_password_and_tls(tmp_path: Path) -> None:
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
        trusted = RedisStore(f"rediss://:pass%3Aword@{address}/0?ssl_ca_certs={authority}")
        assert trusted.insert(make_job(0))
        trusted.close()
        for url in (
            f"rediss://:pass%3Aword@{address}/0",  # the system's authorities
            f"rediss://:wrong@{address}/0?ssl_ca_certs={authority}",
            f"redis://127.0.0.1:{server.port}/0",
        ):
            refused = RedisStore(url)
            with pytest.raises(JobsUnavailable) as caught:
                refused.insert(make_job(1))
            assert not any(word in str(caught.value) for word in ("pass:word", "pass%3Aword", ":wrong"))
            refused.close()
    gc.collect()  # redis-py leaves it open


# Sentinel --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_tls", [False, True])
def test_sentinels_lead_to_the_primary_of_the_moment(tmp_path: Path, has_tls: bool) -> None:
    """With passwords for both and a Sentinel in the list that is away, or with TLS for both."""
    certificate, authority = Certificate(tmp_path), tmp_path / "ca.crt"
    authority.write_bytes(certificate.authority_pem)
    password = None if has_tls else "pass:word"
    files = {"tls_cert_file": certificate.cert, "tls_key_file": certificate.key, "tls_ca_cert_file": authority}
    tls = {name: str(path) for name, path in files.items()} | {"tls_auth_clients": "no", "tls_replication": "yes"}
    options = tls if has_tls else {"requirepass": "pass:word", "masterauth": "pass:word"}
    with ExitStack() as stack:
        servers = []
        for name in "ab":
            (tmp_path / name).mkdir()
            port = {"tls_port": str(free_port())} if has_tls else {}
            servers.append(stack.enter_context(redis_server(tmp_path / name, **options, **port)))
        ports = [int(server.options.get("tls-port", server.port)) for server in servers]
        with Redis(port=servers[1].port, password=password) as client:
            client.replicaof("127.0.0.1", str(ports[0]))
        settings = ["sentinel auth-pass mymaster pass:word", "requirepass watch"]
        if has_tls:
            tls_port = free_port()
            settings = [f"tls-port {tls_port}", *(f"{name.replace('_', '-')} {value}" for name, value in tls.items())]
        watcher = stack.enter_context(sentinel(tmp_path, servers[0], servers[1], *settings, tls=has_tls))
        port = watcher.connection_pool.connection_kwargs["port"]
        url = f"redis+sentinel://:pass%3Aword@127.0.0.1:1,127.0.0.1:{port}/mymaster/0?sentinel_password=watch"
        if has_tls:
            url = f"rediss+sentinel://127.0.0.1:{tls_port}/mymaster?ssl_ca_certs={authority}"
        jobs = RedisStore(url)
        stack.callback(jobs.close)
        open_connections(jobs)
        assert jobs.insert(make_job(10**6))
        assert fail_over(watcher) == ports[1]
        with Redis(port=servers[0].port, password=password) as client:  # until then it accepts writes, which are lost
            until(lambda: client.role()[0] == b"slave", 60, "the old primary is a replica")
        assert count_failures(jobs) <= 1
        with Redis(port=servers[1].port, password=password) as client:
            assert client.role()[0] == b"master"
            assert client.exists(f"{{tercet}}:job:{2 * NUM_CONNECTIONS - 1:032}")
