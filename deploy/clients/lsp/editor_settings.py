"""What a user can set in the editor, in the section `tercet` of its settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
T = TypeVar("T")


class EditorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """
    Attributes:
        url: the server's address; empty: the one of the command line or of this machine.
        key: its API key; empty: none, or `TERCET_API_KEY` where `url` is empty too.
        mode: when suggestions come unasked. `live`: likely next words at every key; `pauses`: ideas when typing
            pauses; `off`: never.
        min_probability: in the mode `live`, predictions end where they are less probable.
        min_usefulness: in the mode `live`, predictions that are expected to save fewer keys are held back.
        prose_only: nothing comes unasked in code, front matter and mathematics of Markdown and plain text.
        model: the name of a model that the server serves; empty: its default.
    """

    url: str = ""
    key: str = ""
    mode: Literal["live", "pauses", "off"] = "live"
    min_probability: Probability = 0.5
    min_usefulness: NonNegative = 1
    prose_only: bool = True
    model: str = ""


def read_settings(*sections: Any) -> EditorSettings:
    """The settings in these sections, of which a later one wins. An editor may send null for what is not set.

    Raises:
        ValueError: a setting has an unknown name, or a value that it cannot have.
    """
    merged: dict[str, Any] = {}
    for section in sections:
        if isinstance(section, dict):
            merged |= {name: value for name, value in section.items() if value is not None}
    return msgspec.convert(merged, EditorSettings)
