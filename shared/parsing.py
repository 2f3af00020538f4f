"""Parses JSON bodies into msgspec structs; errors name the field, its range and the value that was sent.

A field's `Meta.description` is its range in an error's text. This module knows no HTTP server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct

from shared.errors import FieldError, InvalidJson, InvalidRequest

T = TypeVar("T", bound=Struct)


class BodyParser(Generic[T]):
    """Decodes and validates the bodies of one kind of request. Create it at import time, not at the first request.

    msgspec builds its table of a struct's types at the first use, and two threads doing so at once crash the process
    (msgspec 0.22: the second thread reads a half-built table). The constructor builds it.
    """

    def __init__(self, kind: type[T], aliases: Mapping[str, str] | None = None) -> None:
        """
        Args:
            aliases: alternative names of fields, as alias to field name.
        """
        self._kind = kind
        self._aliases = aliases or {}
        self._fields = get_type_hints(kind, include_extras=True)
        msgspec.json.Decoder(kind)

    def __call__(self, raw: bytes) -> T:
        """
        Raises:
            InvalidJson: the body is not a JSON object; the message gives line and column.
            InvalidRequest: a field is missing, unknown or out of its range; the message names it.
        """
        try:
            body = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidJson(f"The body must be a JSON object: {_position(raw, str(error))}") from error
        if not isinstance(body, dict):
            raise InvalidJson(f"The body must be a JSON object, like {{...}}, not {_json_kind(body)}.")
        for alias, name in self._aliases.items():
            if alias in body:
                if name in body:
                    raise _invalid(alias, f"is another name of {name}; send one of them")
                body[name] = body.pop(alias)
        if unknown := sorted(body.keys() - self._fields.keys()):
            raise InvalidRequest(
                f"Unknown field {', '.join(unknown)}; the fields are {', '.join(self._fields)}.",
                fields=tuple(FieldError(name, "unknown field") for name in unknown),
            )
        try:
            return msgspec.convert(body, self._kind)
        except msgspec.ValidationError as error:
            raise self._explain(body, str(error)) from error

    def _explain(self, body: dict[str, Any], message: str) -> InvalidRequest:
        if match := re.search(r"missing required field `(\w+)`", message):
            return _invalid(match[1], f"is required: {_description(self._fields[match[1]])}")
        match = re.search(r"at `\$\.(\w+)([^`]*)`", message)
        if match is None or match[1] not in self._fields:
            return InvalidRequest(message)
        name = match[1]
        value = body.get(name)
        shown = repr(value) if isinstance(value, int | float | bool) or value is None else _json_kind(value)
        return _invalid(name, f"must be {_description(self._fields[name])}, not {shown}")


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {message}.", fields=(FieldError(name, message),))


def _description(annotation: Any) -> str:
    found = (meta.description for meta in get_args(annotation) if isinstance(meta, Meta))
    return next((text for text in found if text), "of another type")


def _json_kind(value: Any) -> str:
    kinds = {str: "a string", list: "an array", dict: "an object", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _position(raw: bytes, message: str) -> str:
    """Line and column in place of the byte offset that msgspec reports."""
    match = re.search(r"\(byte (\d+)\)", message)
    if match is None:
        return f"{message}."
    before = raw[: int(match[1])]
    line = before.count(b"\n") + 1
    column = len(before) - (before.rfind(b"\n") + 1) + 1
    return f"{message.removeprefix('JSON is malformed: ')}, line {line}, column {column}."
