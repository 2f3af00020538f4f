"""Tiers of the tests, servers that tests share, and the npm package for the tests that need it.

CONTRIBUTING.md says what each tier is for. The tier of a test is that of its path (`TIER_BY_PATH`), unless the
test or its module has the mark of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from deploy.tuning.planning import count_gpus
from tests.e2e.harness import ROOT
from tests.e2e.shared_servers import SharedServer, SharedServers
from tests.npm_package import NpmPackage, build_package

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
    "tests/deploy/clients/vscode": "full",
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

# `make test-all` passes `--hypothesis-profile=full`.
hypothesis.settings.register_profile("local", max_examples=20, deadline=None, print_blob=True)
hypothesis.settings.register_profile("full", max_examples=300, deadline=None, print_blob=True)
hypothesis.settings.load_profile("local")


def tier_of(item: pytest.Item) -> str:
    """The tier that the test has been marked with, or else its path's."""
    for marker in item.iter_markers():  # the closest first
        if marker.name in TIERS:
            return marker.name
    path = item.path.relative_to(ROOT)
    return next((TIER_BY_PATH[str(each)] for each in (path, *path.parents) if str(each) in TIER_BY_PATH), "quick")


def pytest_configure() -> None:
    """Refuse a `TIER_BY_PATH` that names what has been moved."""
    if missing := [path for path in TIER_BY_PATH if not (ROOT / path).exists()]:
        raise pytest.UsageError(f"tests/conftest.py gives a tier to what does not exist: {', '.join(missing)}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and deselect GPU tests where there is no GPU."""
    for item in items:
        item.add_marker(tier_of(item))
    # The mark, not the keyword, which a directory of that name is as well.
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or count_gpus({}):
        return
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]


class ModuleScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Runs a module's tests in one process, because they share fixtures, and all end-to-end tests in one: they share
    servers. (With pytest 9.2, xdist_group has no effect in pytest-xdist 3.8.)"""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "tests/e2e" if path.startswith("tests/e2e/") else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ModuleScheduling:
    return ModuleScheduling(config, log)


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
