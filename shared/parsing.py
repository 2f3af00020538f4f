"""Parses JSON bodies into msgspec structs; errors name the field, its range and the number that was sent.

A field's `Meta.description` is its range in an error's text. Texts that a client sent are not repeated, except names of
unknown fields. This module knows no HTTP server.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Raw, Struct

from shared.errors import FieldError, InvalidJson, InvalidRequest, TercetError, invalid_field

T = TypeVar("T", bound=Struct)
# An error shows at most this much of what a client sent.
MAX_SHOWN_NAMES = 5
MAX_SHOWN_CHARS = 40
BYTE_ORDER_MARK = codecs.BOM_UTF8

_TOO_DEEP = "The body must be a JSON object: its arrays and objects are nested too deeply."
_MEMBER_NAME = re.compile(rb'\s*"(?:[^"\\]|\\.)*"\s*:\s*')
_MEMBER_END = re.compile(rb"\s*[,}]")
# JSON's types by the names that msgspec gives to them, and to those of Python.
_KINDS = {
    "array": "an array",
    "list": "an array",
    "object": "an object",
    "dict": "an object",
    "str": "a string",
    "bool": "a boolean",
    "null": "null",
    "NoneType": "null",
}
# A pair of surrogates, or half of one, behind an even number of backslashes, which escape each other.
_SURROGATES = re.compile(
    rb"(?<!\\)((?:\\\\)*)"
    rb"(?:(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
# A surrogate as three bytes, which is not UTF-8 (CESU-8 and WTF-8 have it).
_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
# As HTML's number inputs and Python's `float` have it.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# Python's floats hold whole numbers up to this exactly.
_MAX_EXACT = 2**53


def _number(text: str) -> float:
    """A number with a fraction or an exponent. 1.0 is a whole number, as in JSON Schema; some languages write it so."""
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT else value


def number_in(text: str) -> float | str:
    """The number that a string spells, or the string if it spells none."""
    stripped = text.strip()
    if len(stripped) > MAX_SHOWN_CHARS or not _NUMBER.fullmatch(stripped):
        return text
    try:
        return int(stripped)
    except ValueError:  # it has a fraction or an exponent
        pass
    try:
        return _number(stripped)
    except ValueError:
        return text


# Created at import: see `BodyParser`.
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_value = msgspec.json.Decoder(float_hook=_number).decode


class BodyParser(Generic[T]):
    """Decodes and validates the bodies of one kind of request. Create it at import time, not at the first request.

    A null is as leaving the field out. Half of a surrogate pair, which some clients send where they cut a text, is
    U+FFFD.

    Attributes:
        kind: the struct of the request.
        aliases: alternative names of fields, as alias to field name.
        neutral: values by the name of a field, an alias or a member of a nested object, which are as leaving it out.

    msgspec builds its table of a struct's types at the first use, and two threads doing so at once crash the process
    (msgspec 0.22: the second thread reads a half-built table). The constructor builds it.
    """

    def __init__(
        self,
        kind: type[T],
        aliases: Mapping[str, str] | None = None,
        neutral: Mapping[str, Collection[object]] | None = None,
    ) -> None:
        self.kind = kind
        self.aliases: Mapping[str, str] = aliases or {}
        self.neutral: Mapping[str, Collection[object]] = neutral or {}
        self.fields = get_type_hints(kind, include_extras=True)
        self._names = self.fields.keys() | self.aliases.keys()
        msgspec.json.Decoder(kind)

    def __call__(self, raw: bytes) -> T:
        """
        Raises:
            InvalidJson: the body is not a JSON object; the message gives line and column.
            InvalidRequest: a field is missing, unknown, sent twice or out of its range; the message names it.
        """
        raw = replace_lone_surrogates(raw)
        members = self.members(raw)
        if unknown := members.keys() - self._names:
            raise self._unknown(sorted(unknown))
        body = {}
        for name, member in members.items():
            value = self.value(name, member, raw)
            if not self.is_neutral(name, value):
                body[name] = value
        for alias, name in self.aliases.items():
            if alias in body:
                if name in body:
                    raise invalid_field(alias, f"is another name of {name}; send one of them")
                body[name] = body.pop(alias)
        return self.convert(body)

    def members(self, raw: bytes) -> dict[str, Raw]:
        """The members of the body's object, not decoded.

        Raises:
            InvalidJson: the body is not a JSON object; the message gives line and column.
            InvalidRequest: a member is sent twice.
        """
        members = members_of(raw)
        if _has_repeated_member(raw, members):
            raise _repeated(raw)
        return members

    def is_neutral(self, name: str, value: object) -> bool:
        """Whether a value is as leaving the field out. 0 is not false, and 1 not true."""
        return value is None or (
            name in self.neutral and any(type(value) is type(other) and value == other for other in self.neutral[name])
        )

    def convert(self, body: dict[str, Any]) -> T:
        """The request, from decoded values by field name.

        Raises:
            InvalidRequest: a field is missing or out of its range; the message names it.
        """
        try:
            return msgspec.convert(body, self.kind)
        except msgspec.ValidationError as error:
            raise self._explain(body, str(error)) from error

    def value(self, name: str, value: Raw, raw: bytes) -> Any:
        """Decode the value of a field or an alias.

        Raises:
            InvalidJson: its arrays are nested too deeply, or it is not UTF-8.
            InvalidRequest: it is a number that is too large.
        """
        try:
            return _decode_value(value)
        except msgspec.ValidationError as error:  # a number that no float and no Python integer holds
            name = self.aliases.get(name, name)
            raise invalid_field(
                name, f"must be {description_of(self.fields[name])}, not a number of that size"
            ) from error
        except UnicodeDecodeError as error:
            raise _not_utf8(raw, name) from error
        except RecursionError as error:  # the stack is a frame deeper here than where the members were found
            raise InvalidJson(_TOO_DEEP) from error

    def _unknown(self, names: list[str]) -> InvalidRequest:
        shown = [cut(name) for name in names[:MAX_SHOWN_NAMES]]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        return InvalidRequest(
            f"Unknown field {', '.join(shown)}{more}; the fields are {', '.join(self.fields)}.",
            fields=tuple(FieldError(name, "unknown field") for name in shown),
        )

    def _explain(self, body: dict[str, Any], message: str) -> InvalidRequest:
        if match := re.search(r"missing required field `(\w+)`", message):
            return invalid_field(match[1], f"is required: {description_of(self.fields[match[1]])}")
        match = re.search(r"at `\$\.(\w+)([^`]*)`", message)
        if match is None or match[1] not in self.fields:
            return InvalidRequest(message)
        name, annotation, value, rest = _locate(match[1], self.fields[match[1]], body.get(match[1]), match[2])
        if match := re.search(r"unknown field `([^`]*)`", message):
            unknown = f"{name}.{cut(match[1])}"
            known = ", ".join(fields_of(annotation))
            return InvalidRequest(
                f"Unknown field {unknown}; the fields of {name} are {known}.",
                fields=(FieldError(unknown, "unknown field"),),
            )
        wanted = f"must be {description_of(annotation)}"
        if rest or "`key`" in message:  # an item of the value is wrong
            return invalid_field(name, wanted)
        return invalid_field(name, f"{wanted}, not {_shown(value, is_kind_wrong=', got `' in message)}")


def _shown(value: Any, *, is_kind_wrong: bool) -> str:
    """What an error says was sent: a number, a literal, a value's kind, or the size of a value of the right kind."""
    if isinstance(value, int | float | bool) or value is None:
        return cut(json.dumps(value))
    kind = _KINDS[type(value).__name__]
    if is_kind_wrong:
        return kind
    if not value:
        return f"an empty {kind.partition(' ')[2]}"
    units = {"a string": "characters", "an array": "items", "an object": "members"}
    return f"one of {len(value):,} {units[kind]}"


def _locate(name: str, annotation: Any, value: Any, path: str) -> tuple[str, Any, Any, str]:
    """The innermost field on a path of msgspec's, with dots in its name: name, annotation, value, and the rest of the
    path, which leads to an item of a list."""
    while (match := re.match(r"\.(\w+)", path)) and (fields := fields_of(annotation)).get(match[1]) is not None:
        name, annotation, path = f"{name}.{match[1]}", fields[match[1]], path[match.end() :]
        value = value.get(match[1])
    return name, annotation, value, path


def fields_of(annotation: Any) -> dict[str, Any]:
    """The annotated fields of the struct that an annotation contains; empty if it contains none."""
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return get_type_hints(annotation, include_extras=True)
    return next((fields for part in get_args(annotation) if (fields := fields_of(part))), {})


def replace_lone_surrogates(raw: bytes) -> bytes:
    """The body with U+FFFD in place of each half of a surrogate pair. Its length stays, so positions in errors do."""
    # A search for one byte is many times as fast as one for several.
    if b"\\" in raw and (b"\\ud" in raw or b"\\uD" in raw):
        raw = _SURROGATES.sub(lambda match: match[0] if match[2] else match[1] + rb"\ufffd", raw)
    return _ENCODED_SURROGATE.sub("\ufffd".encode(), raw) if b"\xed" in raw else raw


def members_of(raw: bytes) -> dict[str, Raw]:
    """The members of the body's object, not decoded. Of a repeated name, the last member.

    A byte order mark before the object is skipped (RFC 8259, § 8.1): some clients cannot leave it out.

    Raises:
        InvalidJson: the body is not a JSON object; the message gives line and column.
    """
    raw = raw.removeprefix(BYTE_ORDER_MARK)
    try:
        return _decode_members(raw)
    except RecursionError as error:
        raise InvalidJson(_TOO_DEEP) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(raw, "The body") from error
    except msgspec.ValidationError as error:  # valid so far, but no object
        kind = match[1] if (match := re.search(r"got `(\w+)`", str(error))) else ""
        shown = _KINDS.get(kind, "a number")
        raise InvalidJson(f"The body must be a JSON object, like {{...}}, not {shown}.") from error
    except msgspec.DecodeError as error:
        raise InvalidJson(f"The body must be a JSON object: {_syntax_error(raw, str(error))}") from error


def _has_repeated_member(raw: bytes, members: dict[str, Raw]) -> bool:
    """Whether the object has two members of one name.

    Without a repeated name, the members in their order are the whole object. With one, the dictionary has fewer
    members, or the last of the name in place of the first. A parse by pairs of `json` would take three times as long.
    """
    position = raw.index(b"{") + 1
    for value in members.values():
        name = _MEMBER_NAME.match(raw, position)
        if name is None or not raw.startswith(data := memoryview(value), name.end()):  # a view: a copy takes 0.6 ms/MB
            return True
        end = _MEMBER_END.match(raw, name.end() + len(data))
        if end is None:
            return True
        position = end.end()
    return bool(members) and raw[position - 1 : position] != b"}"


def _repeated(raw: bytes) -> TercetError:
    try:
        # `int` refuses long numbers, and which one it is does not matter here.
        pairs: list[tuple[str, Any]] = json.loads(raw, object_pairs_hook=list, parse_int=str)
    except RecursionError:  # its limit is lower than msgspec's
        return InvalidJson(_TOO_DEEP)
    except UnicodeDecodeError:  # in a member that msgspec has skipped
        return _not_utf8(raw, "The body")
    name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    return invalid_field(name, "is sent twice; send it once")


def _not_utf8(raw: bytes, name: str) -> InvalidJson:
    """Name line and column of the first byte that is not UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return InvalidJson(f"{name} must be UTF-8, which byte 0x{raw[error.start]:02x} is not{_at(raw, error.start)}.")
    return InvalidJson(f"{name} must be UTF-8.")


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def description_of(annotation: Any) -> str:
    """What a field may be: the first description in its annotation."""
    return next(_descriptions(annotation), "of another type")


def _descriptions(annotation: Any) -> Iterator[str]:
    parts = get_args(annotation)
    yield from (part.description for part in parts if isinstance(part, Meta) and part.description)
    for part in parts:
        yield from _descriptions(part)


def _syntax_error(raw: bytes, message: str) -> str:
    """What is wrong, with line and column in place of the byte offset that msgspec reports."""
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or (b"\0" in raw[:2] and len(raw) > 1):
        return "it must be UTF-8, and it is UTF-16 or UTF-32."
    if match := re.search(r" ?\(byte (\d+)\)", message):
        return f"{message[: match.start()].removeprefix('JSON is malformed: ')}{_at(raw, int(match[1]))}."
    if not raw.strip():
        return "it is empty."
    return f"it ends too early{_at(raw, len(raw))}."


def _at(raw: bytes, position: int) -> str:
    before = raw[:position]
    line = before.count(b"\n") + 1
    column = len(before) - (before.rfind(b"\n") + 1) + 1
    return f", line {line}, column {column}"
