"""Deselects GPU tests on machines without a GPU."""

import pytest

from deploy.planning import count_gpus


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items) or count_gpus({}):
        return
    kept = [item for item in items if "gpu" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "gpu" in item.keywords])
    items[:] = kept
