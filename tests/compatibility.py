"""Writes docs/COMPATIBILITY.md, what becomes of each field of other servers' requests, and the fields in docs/API.md.

    python -m tests.compatibility >docs/COMPATIBILITY.md

Written from the schemas that parse requests, and from those that the peers publish
(`tests/gateway/api/peer_schemas.json`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import NODEFAULT, structs

from gateway.api.fields import OwnFields
from gateway.api.openai.schema import parse_completion_request
from gateway.api.schema import ALIASES, AutocompleteRequest
from gateway.api.tgi_schema import parse_tgi_body
from gateway.api.tolerance import TolerantParser
from shared.parsing import description_of, fields_of

Outcome = Literal["honoured", "neutral", "warned", "refused"]
SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "gateway/api/peer_schemas.json").read_text())
PARSERS: Mapping[str, TolerantParser[Any]] = {
    "/v1/completions": parse_completion_request,
    "/generate": parse_tgi_body,
    "/": parse_tgi_body,
}
HEAD = """<!-- written by tests.compatibility -->
# Compatibility with other servers

Written by `python -m tests.compatibility`; do not edit. [CLIENTS.md](CLIENTS.md) has recipes, [API.md](API.md) the
routes.

In `/v1`, the routes of Text Generation Inference, SageMaker's `/invocations`, and `/jobs` with the names of others, no
unknown field, null or neutral value fails a request. `/autocomplete` is strict about unknown fields, so that a typo
gets an answer. A field of another server is

- **honoured**: it does here what it does there, within the bounds of the last column;
- **neutral**: it changes nothing in the text;
- **warned**: it is ignored, and unless its value is neutral too, `warnings` in the answer names it;
- **refused**: without it the text would be wrong, so only a neutral value is accepted.

Null, `false`, `0` and what is empty are neutral wherever a field is warned or refused. A field that no table has is
ignored with a warning, which proposes the name that was perhaps meant. The log counts such fields, and does not name
them.

Three completions, in every dialect: `n` in `/v1`, `num_return_sequences` (also `n`) in the dialects of Hugging Face and
JumpStart, which answer a list then, `best_of` with `details` in Text Generation Inference's, and always with
SageMaker's `{"input": …}`. The name of a model that is not served is a 404 in `/v1`, as with vLLM; `tgi`, the
placeholder of Text Generation Inference, means the default model, and that server's own routes ignore names.

Values with a meaning of their own: `seed` -1 is random, and larger seeds than 2⁶³ - 1 count by their lower 63 bits;
`top_p` 0 is greedy, but off in `/autocomplete` and `/jobs`; `top_k` 0, -1 and beyond the vocabulary is off;
`max_tokens` -1 is as many as there is room for. An empty stop string stops nothing. Half of a surrogate pair is U+FFFD.
In `/jobs` with the names of others, a number in a string is that number.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of a field; `note` says within which bounds it is honoured, or what is neutral."""

    field: str
    outcome: Outcome
    note: str


def rows(parser: TolerantParser[Any], names: list[str], *, nested: str = "") -> list[Row]:
    """
    Args:
        nested: the field whose members `names` are; "": those of the body.

    Raises:
        KeyError: a field is not known to the parser.
    """
    own = fields_of(parser.kind)
    own = fields_of(own[nested]) if nested else own
    return [_row(parser, own, name) for name in names]


def _row(parser: TolerantParser[Any], own: Mapping[str, Any], name: str) -> Row:
    target = name if name in own else parser.aliases.get(name, "")
    if target in own:
        note = description_of(own[target])
        return Row(name, "honoured", note if target == name else f"as `{target}`: {note}")
    peer = parser.peer_fields[name]
    if peer.effect == "none":
        return Row(name, "neutral", "")
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in peer.neutral)
    note = f"neutral too: {neutral}" if neutral else ""
    return Row(name, "refused" if peer.effect == "wrong" else "warned", note)


def table(_name: str) -> str:
    """A row for each field of `POST /autocomplete`, the only table: its names, values and default."""
    fields = {field.name: field for field in structs.fields(AutocompleteRequest)}
    lines = ["| field | | default |", "|---|---|---|"]
    # Those that choose the text first; parameters of sampling after them.
    for own, field in sorted(fields.items(), key=lambda item: item[0] in OwnFields.__struct_fields__):
        names = ", ".join(f"`{one}`" for one in (own, *(one for one, of in ALIASES.items() if of == own)))
        default = "required" if field.required else _shown(field)
        lines.append(f"| {names} | {description_of(field.type)} | {default} |")
    return "\n".join(lines)


def _shown(field: structs.FieldInfo) -> str:
    value = field.default if field.default_factory is NODEFAULT else field.default_factory()
    return "" if value in (None, []) else json.dumps(value)


def page() -> str:
    return "\n".join([HEAD, *(_table(peer, schema) for peer, schema in SCHEMAS["peers"].items())])


def _table(peer: str, schema: dict[str, Any]) -> str:
    parser = PARSERS[schema["path"]]
    found = rows(parser, [*schema["fields"]], nested="parameters" if parser is parse_tgi_body else "")
    order: tuple[Outcome, ...] = get_args(Outcome)
    found.sort(key=lambda row: (order.index(row.outcome), row.field))
    lines = [
        f"## {peer}: `POST {schema['path']}`",
        "",
        f"Source: {schema['source']}.",
        "",
        "| field | | |",
        "|---|---|---|",
    ]
    lines += [f"| `{row.field}` | {row.outcome} | {row.note} |" for row in found]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
