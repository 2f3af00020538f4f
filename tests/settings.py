"""Settings for tests, by the names of their variables."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from shared.settings import PREFIX, Settings


def make_settings(base: Settings | None = None, /, **values: Any) -> Settings:
    """`base`, or the defaults, with these values in their groups; `run_dir` stands for TERCET_RUN_DIR."""
    made = base or Settings()
    for group in fields(Settings):
        own = {
            setting.name: values.pop(variable)
            for setting in fields(getattr(made, group.name))
            if (variable := (setting.metadata["name"] or setting.name).lower()) in values
        }
        made = replace(made, **{group.name: replace(getattr(made, group.name), **own)})
    assert not values, f"no settings: {', '.join(PREFIX + name.upper() for name in values)}"
    return made
