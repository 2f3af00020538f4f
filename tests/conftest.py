"""Deselects GPU tests on machines without a GPU, and builds the npm package for the tests that need it."""

import pytest

from deploy.planning import count_gpus
from tests.npm_package import NpmPackage, build_package


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The mark, not the keyword, which a directory of that name is as well.
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or count_gpus({}):
        return
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]


@pytest.fixture(scope="session")
def npm_package(request: pytest.FixtureRequest) -> NpmPackage:
    """The package, built from the working tree. Its tools stay in pytest's cache."""
    return build_package(request.config.cache.mkdir("npm"))
