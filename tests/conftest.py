"""Tiers of the tests, servers that tests share, and the npm package for the tests that need it.

CONTRIBUTING.md says what each tier is for. The tier of a test is that of its path (`TIER_BY_PATH`), unless the
test or its module has the mark of another.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from deploy.tuning.planning import count_gpus
from shared.api_keys import new_key
from tests.e2e.harness import ROOT
from tests.e2e.shared_servers import SharedServer, SharedServers
from tests.npm_package import NpmPackage, build_package

T = TypeVar("T")

# `quick` is the tier of `make test`: what needs no server, and what runs on the shared servers.
TIERS = ("quick", "integration", "full", "bench", "clients", "deploy")
# Tiers of folders and modules; what is not listed is `quick`.
TIER_BY_PATH = {
    "tests/bench/gpu": "bench",
    "tests/bench/test_commands.py": "bench",
    "tests/browser": "integration",
    "tests/browser/test_firefox.py": "full",
    "tests/browser/test_obsidian.py": "full",
    "tests/browser/test_vscode.py": "full",
    "tests/chaos": "integration",
    "tests/clients": "full",
    "tests/deploy/cloud/aws": "integration",
    "tests/deploy/clients/npm": "integration",
    "tests/deploy/cloud/test_moving.py": "integration",
    "tests/deploy/supervision/test_nginx.py": "integration",
    "tests/deploy/packaging/test_wheel.py": "integration",
    "tests/deploy/tuning/tune/test_tune_command.py": "integration",
    "tests/e2e": "integration",
    "tests/gateway/jobs/test_failover.py": "integration",
    "tests/workers/engine/cpu/test_neon.py": "integration",
    "tests/workers/engine/cuda/kernels/test_compile.py": "full",
    "tests/workers/engine/cuda/kernels/test_self_check.py": "full",
    "tests/workers/engine/cuda/test_triton_runner.py": "full",
}

# About how long a test takes, in seconds, where that is more than half a second. xdist hands out whole modules in the
# order of collection: those that take longest first, so that the processes end together.
SECONDS_BY_PATH = {
    "tests/browser": 3.0,
    "tests/chaos": 40.0,
    "tests/deploy/cloud/aws": 2.0,
    "tests/deploy/packaging/test_wheel.py": 20.0,
    "tests/deploy/tuning/tune/test_tune_command.py": 10.0,
    "tests/documentation": 2.0,
    "tests/e2e": 6.0,
    "tests/e2e/test_bodies.py": 0.5,
    "tests/gateway/jobs": 2.0,
    "tests/gateway/jobs/test_damage.py": 0.5,
    "tests/workers/engine": 1.0,
}

# `make test-all` passes `--hypothesis-profile=full`.
hypothesis.settings.register_profile("local", max_examples=20, deadline=None, print_blob=True)
hypothesis.settings.register_profile("full", max_examples=300, deadline=None, print_blob=True)
hypothesis.settings.load_profile("local")


def tier_of(item: pytest.Item) -> str:
    """The tier that the test has been marked with, or else its path's."""
    for marker in item.iter_markers():  # the closest first
        if marker.name in TIERS:
            return marker.name
    return by_path(TIER_BY_PATH, item, "quick")


def by_path(values: Mapping[str, T], item: pytest.Item, default: T) -> T:
    """The value of the test's module, or else of the closest folder around it."""
    path = item.path.relative_to(ROOT)
    return next((values[str(each)] for each in (path, *path.parents) if str(each) in values), default)


def pytest_configure() -> None:
    """Refuse a table that names what has been moved."""
    if missing := [path for path in {*TIER_BY_PATH, *SECONDS_BY_PATH} if not (ROOT / path).exists()]:
        raise pytest.UsageError(f"tests/conftest.py names what does not exist: {', '.join(missing)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark each test with its tier, deselect GPU tests where there is no GPU, and put the longest modules first."""
    for item in items:
        item.add_marker(tier_of(item))
    # The mark, not the keyword, which a directory of that name is as well.
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not count_gpus({}):
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
    yield  # pytest selects the tier
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] += by_path(SECONDS_BY_PATH, item, 0.5)
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish() -> None:
    """Each engine that is loaded collects garbage, which takes 0.2 s with the objects of all modules."""
    gc.freeze()


@pytest.fixture(scope="session")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="session")
def key(key_path: Path) -> str:
    """An API key of the file."""
    return new_key(key_path, "tests")[0]


@pytest.fixture(scope="session")
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServers]:
    servers = SharedServers(lambda: tmp_path_factory.mktemp("t"))
    yield servers
    servers.close()


@pytest.fixture
def server_with(shared_servers: SharedServers) -> Callable[..., SharedServer]:
    """The server with the given settings that all tests share; see `tests.e2e.shared_servers`."""
    return shared_servers.get


@pytest.fixture
def short_tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path is short enough for Unix sockets in it."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture(scope="session")
def npm_package(request: pytest.FixtureRequest) -> NpmPackage:
    """The package, built from the working tree. Its tools stay in pytest's cache."""
    return build_package(request.config.cache.mkdir("npm"))
