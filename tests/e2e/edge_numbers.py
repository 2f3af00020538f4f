"""Every number that a client can send, at the edges of its type, in every numeric field of a JSON schema.

The fields are found in the schema, so a new one is tried as well. Sends nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

Json = dict[str, Any]
Wrap = Callable[[object], Any]
# As JSON writes them, because Python's floats hold neither 1e400 nor the difference between 1 and 1.0.
EDGES = (
    *("0", "-0.0", "1", "-1", "1.0", "0.5"),
    # The smallest float64, and denormal numbers; the smallest normal ones of float64 and float32; about their inverses.
    *("5e-324", "-5e-324", "1e-320", "2.2250738585072014e-308", "1e-200", "1.1754943508222875e-38", "1e-45", "1e-400"),
    # The distances from 1 to its neighbours.
    *("0.9999999999999999", "1.0000000000000002", "1.1920929e-07"),
    # The largest float32 and float64, and beyond.
    *("3.4028234663852886e38", "3.4028235677973366e38", "-1e39", "1.7976931348623157e308", "1e400", "-1e400"),
    *map(str, chain.from_iterable((2**bits - 1, 2**bits, -(2**bits), -(2**bits) - 1) for bits in (31, 53, 63))),
    *map(str, (2**53 + 1, 2**64 - 1, 2**64, 10**400, -(10**400))),
)
# What some clients write though it is no JSON.
NOT_JSON = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True, eq=False)
class Field:
    """A numeric field.

    Attributes:
        names: names of it and of what contains it, as an error may have them.
        schema: of the number.
        within: the part of a body that has the field, with a given value.
    """

    names: tuple[str, ...]
    schema: Json
    within: Wrap

    @property
    def valid_values(self) -> list[str]:
        """The edges, and the neighbours of the field's bounds, that are within these bounds."""
        bounds = [value for name, value in self.schema.items() if name.endswith(("imum", "Minimum", "Maximum"))]
        if self.schema["type"] == "integer":
            near = [str(bound + step) for bound in bounds for step in (-1, 0, 1)]
        else:
            near = [repr(math.nextafter(bound, to)) for bound in bounds for to in (-math.inf, bound, math.inf)]
        low: Any = self.schema.get("minimum", self.schema.get("exclusiveMinimum", -math.inf))
        high: Any = self.schema.get("maximum", math.inf)
        is_whole = self.schema["type"] == "integer"
        return [
            text
            for text in dict.fromkeys((*EDGES, *near))
            if math.isfinite(number := float(text)) and low <= number <= high and not (is_whole and number % 1)
        ]


def numeric_fields(schema: Json, components: Mapping[str, Json], names: tuple[str, ...] = ()) -> Iterator[Field]:
    """The numeric fields of a schema of OpenAPI 3.1.

    Args:
        components: schemas by their names in references.
    """

    def inside(part: Json, wrap: Wrap, *more: str) -> Iterator[Field]:
        for found in numeric_fields(part, components, (*names, *more)):
            yield Field(found.names, found.schema, partial(_wrapped, wrap, found.within))

    if "$ref" in schema:
        yield from numeric_fields(components[schema["$ref"].rpartition("/")[2]], components, names)
    if schema.get("type") in {"integer", "number"}:
        yield Field(names, schema, lambda value: value)
    for part in schema.get("anyOf", ()):
        yield from numeric_fields(part, components, names)
    for name, part in schema.get("properties", {}).items():
        alias = re.match(r"another name of (\w+):", part.get("description", ""))
        yield from inside(part, partial(_member, name), name, *(alias.groups() if alias else ()))
    if isinstance(part := schema.get("additionalProperties"), dict):
        yield from inside(part, partial(_member, "7"))
    if isinstance(part := schema.get("items"), dict):
        yield from inside(part, partial(_item, 0, 1))
    parts = schema.get("prefixItems", ())
    for place, part in enumerate(parts):
        yield from inside(part, partial(_item, place, len(parts)))


def _wrapped(outer: Wrap, inner: Wrap, value: object) -> Any:
    return outer(inner(value))


def _member(name: str, value: object) -> Json:
    return {name: value}


def _item(place: int, number: int, value: object) -> list[object]:
    return [value if each == place else 1 for each in range(number)]


def merged(body: Any, part: Any) -> Any:
    """A body with the members of `part`, those of nested objects too."""
    if not isinstance(body, dict) or not isinstance(part, dict):
        return part
    return body | {name: merged(body.get(name), value) for name, value in part.items()}


def written(body: Json, numbers: Mapping[Field, str]) -> bytes:
    """A JSON body in which fields have these numbers, as they are written."""
    for index, field in enumerate(numbers):
        body = merged(body, field.within(f"@{index}@"))
    text = json.dumps(body)
    for index, number in enumerate(numbers.values()):
        text = text.replace(f'"@{index}@"', number)
    return text.encode()
