"""Deselects GPU tests on machines without a GPU."""

import pytest

from deploy.planning import count_gpus


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The mark, not the keyword, which a directory of that name is as well.
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or count_gpus({}):
        return
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in marked]
