"""Parses bodies of other servers' dialects: what these servers ignore never fails a request.

Three kinds of fields are not Tercet's: those of peers that change nothing, those that change the answer and are not
supported (a warning in it), and those without which the text would be wrong (refused by name). An unknown field
is ignored with a warning, and may be a typo. The table of peers' fields is `gateway.api.peer_fields`. This module knows
no dialect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import Raw, Struct

from shared.errors import invalid_field
from shared.parsing import (
    MAX_SHOWN_NAMES,
    BodyParser,
    cut,
    description_of,
    fields_of,
    number_in,
    replace_lone_surrogates,
)

T = TypeVar("T", bound=Struct)


@dataclass(frozen=True, slots=True)
class PeerField:
    """A field of other servers that Tercet does not have.

    Attributes:
        effect: what ignoring it costs: nothing; something in the answer, or another text than the client wants, which
            is still a completion of its prompt, so that the client is warned; or a text that is wrong, so that the
            request is refused.
        neutral: values that mean "as usual", besides null, false, 0 and what is empty. An empty object is a JSON schema
            that allows everything, so it is not neutral where the text would be wrong.
        note: the end of the warning or of the error.
    """

    effect: Literal["none", "warned", "wrong"]
    neutral: tuple[Any, ...] = ()
    note: str = ""

    def is_neutral(self, value: object) -> bool:
        if value == {} and self.effect == "wrong":
            return False
        return not value or value in self.neutral


@dataclass(slots=True)
class Tolerated(Generic[T]):
    """A request, and what of its body was ignored.

    Attributes:
        warnings: a sentence for each field that would have changed the answer, for the client.
        num_unknown: unknown names, for the log. The names are the client's words, and are not logged.
    """

    request: T
    warnings: list[str]
    num_unknown: int


@dataclass(slots=True)
class _Ignored:
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class TolerantParser(Generic[T]):
    """Decodes and validates the bodies of one kind of request; `BodyParser` says how. Create it at import time.

    Attributes:
        kind: the struct of the request.
        aliases: alternative names of fields, as alias to field name.
        peer_fields: fields that the struct does not have.
    """

    def __init__(
        self,
        kind: type[T],
        peer_fields: Mapping[str, PeerField],
        aliases: Mapping[str, str] | None = None,
        neutral: Mapping[str, Collection[object]] | None = None,
        *,
        numbers_as_strings: bool = False,
    ) -> None:
        """
        Args:
            kind: a struct. Its nested structs are as tolerant.
            peer_fields: fields that the struct does not have.
            aliases: as `BodyParser`'s, also for members of nested objects. Of two names of an optional field, the
                field's own counts.
            neutral: as `BodyParser`'s.
            numbers_as_strings: a number in a string, as a form in a page sends it, is that number.
        """
        self._strict = BodyParser(kind, aliases, neutral)
        self.kind = kind
        self.aliases = self._strict.aliases
        self.peer_fields = peer_fields
        self._required = {field.name for field in msgspec.structs.fields(kind) if field.required}
        self._numeric = {
            name for name, annotation in self._strict.fields.items() if numbers_as_strings and _is_number(annotation)
        }

    def __call__(self, raw: bytes) -> Tolerated[T]:
        """
        Raises:
            InvalidJson: the body is not a JSON object.
            InvalidRequest: a field is missing, sent twice, out of its range, or cannot be ignored.
        """
        raw = replace_lone_surrogates(raw)
        ignored = _Ignored()
        decoded = {name: self._decode(name, value, raw) for name, value in self._strict.members(raw).items()}
        body = self._known(decoded, self._strict.fields, ignored)
        request = self._strict.convert(body)
        warnings = ignored.warnings
        if ignored.unknown:
            warnings.append(self._unknown_warning(ignored.unknown))
        return Tolerated(request, warnings, len(ignored.unknown))

    def _decode(self, name: str, value: Raw, raw: bytes) -> Any:
        """The value; of a field that is not Tercet's, None also for what cannot be decoded."""
        if name in self._strict.fields or name in self._strict.aliases:
            decoded = self._strict.value(name, value, raw)
            if isinstance(decoded, str) and self._strict.aliases.get(name, name) in self._numeric:
                return number_in(decoded)
            return decoded
        try:
            return msgspec.json.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ... if name in self.peer_fields else None

    def _known(
        self, members: dict[str, Any], fields: Mapping[str, Any], ignored: _Ignored, path: str = ""
    ) -> dict[str, Any]:
        """The fields of a struct without what is neutral, aliases resolved; in nested structs likewise."""
        known: dict[str, Any] = {}
        aliased: list[tuple[str, str, Any]] = []
        for sent, value in members.items():
            name = sent if sent in fields else self._strict.aliases.get(sent, "")
            if self._strict.is_neutral(sent, value):
                continue
            if name not in fields:
                self._ignore(sent, value, ignored, path)
            elif name != sent:
                aliased.append((name, sent, value))
            elif isinstance(value, dict) and (nested := fields_of(fields[name])):
                known[name] = self._known(value, nested, ignored, f"{path}{name}.")
            else:
                known[name] = value
        for name, sent, value in aliased:
            if name not in known:
                known[name] = value
                continue
            self._check(path + sent, value, fields[name])
            if known[name] != value:
                if name in self._required:
                    raise invalid_field(path + sent, f"is another name of {name}; send one of them")
                ignored.warnings.append(f"{path}{sent} was ignored: it is another name of {name}, which was sent too.")
        return known

    def _check(self, name: str, value: object, annotation: Any) -> None:
        """
        Raises:
            InvalidRequest: the value, which is not used, could not be.
        """
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError as error:
            raise invalid_field(name, f"must be {description_of(annotation)}") from error

    def _ignore(self, name: str, value: object, ignored: _Ignored, path: str) -> None:
        """
        Raises:
            InvalidRequest: the field cannot be ignored.
        """
        peer = self.peer_fields.get(name)
        if peer is None:
            ignored.unknown.append(path + name)
        elif peer.effect == "none" or peer.is_neutral(value):
            return
        elif peer.effect == "wrong":
            raise invalid_field(path + name, f"is not supported, and without it the text would be wrong{peer.note}")
        else:
            ignored.warnings.append(f"{path}{name} was ignored: it is not supported{peer.note}.")

    def _unknown_warning(self, names: list[str]) -> str:
        shown = ", ".join(cut(name) for name in names[:MAX_SHOWN_NAMES])
        more = f" and {len(names) - MAX_SHOWN_NAMES} more" if len(names) > MAX_SHOWN_NAMES else ""
        warning = f"Unknown and ignored: {shown}{more}."
        own = dict.fromkeys(self._strict.fields, "")
        for outer, annotation in self._strict.fields.items():
            own = dict.fromkeys(fields_of(annotation), f"{outer}.") | own
        for sent in names[:MAX_SHOWN_NAMES]:
            last = sent.rpartition(".")[2]
            for name in get_close_matches(last, own, n=1, cutoff=0.8):
                if own[name] + name != sent:
                    warning += f" Perhaps {cut(sent)} should be {own[name]}{name}."
        return warning


def _is_number(annotation: Any) -> bool:
    """Whether the field is a number, or a number or null."""
    if annotation in (int, float):
        return True
    return any(_is_number(part) for part in get_args(annotation))
