"""The parser of JSON bodies: every malformed body is refused with its position, every repeated field with its name."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from shared.errors import InvalidJson, InvalidRequest, TercetError
from shared.parsing import BodyParser


class Body(Struct, kw_only=True):
    text: Annotated[str, Meta(description="a string")]
    number: Annotated[float, Meta(ge=0, le=5, description="a number from 0 to 5")] = 0
    count: Annotated[int, Meta(ge=0, le=2**63 - 1, description="a whole number")] = 0
    words: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(description="a list of words")] = []


parse = BodyParser(Body, {"amount": "count"})


def test_a_byte_order_mark_is_skipped_and_counts_in_no_position() -> None:
    assert parse(b'\xef\xbb\xbf{"text": "a"}') == Body(text="a")
    assert parse(b'\xef\xbb\xbf \n{"text": "\xef\xbb\xbf"}') == Body(text="\ufeff")
    with pytest.raises(InvalidJson, match=r"expected ':', line 1, column 9"):
        parse(b'\xef\xbb\xbf{"text" 1}')
    with pytest.raises(InvalidRequest, match="text is sent twice"):
        parse(b'\xef\xbb\xbf{"text": "a", "text": "b"}')
    for twice in (b"\xef\xbb\xbf\xef\xbb\xbf{}", b"{\xef\xbb\xbf}", b"\xef\xbb{}"):
        with pytest.raises(InvalidJson):
            parse(twice)


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        (b"", "it is empty."),
        (b" \n", "it is empty."),
        *(
            ('{"text": "a"}'.encode(encoding), "it must be UTF-8, and it is UTF-16 or UTF-32.")
            for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
        ),
        (b"\x00", "invalid character, line 1, column 1."),
        (b'{"text": "\x00"}', "invalid character, line 1, column 11."),
        (b'{"text": "a"} x', "trailing characters, line 1, column"),
        (b'{"text": "a"}{}', "trailing characters, line 1, column"),
        (b'{"text": "a"', "it ends too early, line 1, column 13."),
        (b'{"text": "a', "it ends too early, line 1, column 12."),
        (b'{"text":\n "a",}', "line 2, column 6."),
        (b'{"number":\nNaN}', "invalid character, line 2, column 1."),
        (b'{"number": -Infinity}', "line 1, column 13."),
        (b'{"text": "\\ud8"}', "line 1, column"),
        (b'{"text":' + b"[" * 100_000, "its arrays and objects are nested too deeply."),
        (b'{"text":' + b"[" * 1_000 + b"]" * 1_000 + b"}", "its arrays and objects are nested too deeply."),
        (b'{"other":' + b'{"a":' * 1_000 + b"1" + b"}" * 1_001, "its arrays and objects are nested too deeply."),
    ],
)
def test_malformed_json_is_refused_with_its_position(raw: bytes, detail: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        parse(raw)
    assert caught.value.detail.startswith("The body must be a JSON object: ")
    assert detail in caught.value.detail


def test_json_without_an_object_is_refused() -> None:
    kinds = {b'"text"': "a string", b"null": "null", b"3": "a number", b"3.5": "a number", b"true": "a boolean"}
    kinds |= dict.fromkeys((b"[" * 100_000, b"[" * 1_000 + b"]" * 1_000, b"[{}]"), "an array")
    for raw, kind in kinds.items():
        with pytest.raises(InvalidJson, match=f"like {{...}}, not {kind}"):
            parse(raw)


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        (b'{"text":\n"\xff"}', "text must be UTF-8, which byte 0xff is not, line 2, column 2."),
        (b'{"text": "\xed\x20"}', "text must be UTF-8, which byte 0xed is not, line 1, column 11."),
        (b'{"words": ["ok", "\xc3"]}', "words must be UTF-8, which byte 0xc3 is not, line 1, column 19."),
        (b'{"\xff": 1}', "The body must be UTF-8, which byte 0xff is not, line 1, column 3."),
        (b'{"text": "\xff", "text": "a"}', "The body must be UTF-8, which byte 0xff is not, line 1, column 11."),
    ],
)
def test_text_that_is_not_utf8_is_refused_with_field_and_position(raw: bytes, detail: str) -> None:
    with pytest.raises(InvalidJson) as caught:
        parse(raw)
    assert caught.value.detail == detail


# Members after a text, by the field that the error names.
WRONG = {
    "number": [b'"number": 1e999', b'"number": -1e999', b'"number": 1' + b"0" * 400, b'"number": "1"'],
    "count": [
        *(b'"count": 1' + b"0" * 400, b'"amount": 1' + b"0" * 5_000, b'"count": 9223372036854775808', b'"count": 1.5'),
        *(b'"count": 1e16', b'"count": true', b'"count": 1, "count": 12', b'"count": 12, "count": 1'),
    ],
    "words": [b'"words": {}', b'"words": ["b", null]', b'"words": ' + b"[" * 500 + b"]" * 500],
    "txt": [b'"txt": "b"'],
    "amount": [b'"count": 1, "amount": 1', b'"amount": 1, "amount": 1'],
    "text": [
        *(b'"text": "a"', b'"count": 1, "t\\u0065xt": "b"', b'"text": ' + b"9" * 5_000, b'"text": -1e999'),
        *(b'"text": "\xed\xa0\x80"', b'"text": ' + b"[" * 300 + b"]" * 300),
    ],
}


@pytest.mark.parametrize(("field", "members"), [(field, each) for field, members in WRONG.items() for each in members])
def test_a_wrong_or_repeated_field_is_named(field: str, members: bytes) -> None:
    bodies = [b'{"text": "a", %s}' % members]
    if field == "text":
        bodies += [b"{}", b'{"text": null}', b'{%s, "text": "a"}' % members]
    for raw in bodies:
        with pytest.raises(InvalidRequest) as caught:
            parse(raw)
        assert [error.field for error in caught.value.fields] == [field]
        assert caught.value.detail.startswith((f"{field} ", f"Unknown field {field};"))


@pytest.mark.parametrize(("raw", "count"), [(b"3.0", 3), (b"-0.0", 0), (b"1e3", 1000), (b"9007199254740992.0", 2**53)])
def test_a_whole_number_may_be_written_with_a_fraction(raw: bytes, count: int) -> None:
    """JSON Schema, 6.1.1: 1.0 is an integer. Some languages write all numbers so."""
    body = parse(b'{"text": "a", "count": %s, "number": 2.0}' % raw)
    assert (body.count, type(body.count)) == (count, int)
    assert (body.number, type(body.number)) == (2.0, float)


def test_no_depth_of_nesting_is_an_error_of_the_server() -> None:
    """Parsers differ in how deep they go, and so does the stack below them."""
    for depth in (*range(100, 900, 50), *range(900, 1_010)):
        for text in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
            for raw in (b'{"text": %s}' % text, b'{"text": "a", "text": %s}' % text, b'{"words": [%s]}' % text):
                with pytest.raises((InvalidJson, InvalidRequest)):
                    parse(raw)


def test_errors_do_not_grow_with_the_body() -> None:
    names = b",".join(b'"field %d": 0' % number for number in range(10_000))
    for raw in (b"{%s}" % names, b'{"%s": 1}' % (b"x" * 1_000_000), b'{"text": "a", "count": -%s}' % (b"9" * 4_000)):
        with pytest.raises(InvalidRequest) as caught:
            parse(raw)
        assert len(caught.value.detail) < 500
        assert len(caught.value.fields) <= 5


def test_texts_that_were_sent_are_not_repeated() -> None:
    for raw in (b'{"text": ["secret"]}', b'{"number": "secret"}', b'{"text": "secret', b'{"words": {"secret": 1}}'):
        with pytest.raises(TercetError) as caught:
            parse(raw)
        assert "secret" not in caught.value.detail


WHITESPACE = st.text(alphabet=" \t\r\n", max_size=2)
NAMES = st.sampled_from(["text", "number", "count", "words"])
VALUES = {
    "text": st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    "number": st.floats(0, 5),
    "count": st.integers(0, 9),
    "words": st.lists(st.sampled_from(["text", '"', ",", "}", "\\"]), max_size=2),
}


@given(st.data())
def test_exactly_the_bodies_with_a_repeated_name_are_refused(data: st.DataObject) -> None:
    """Whatever their white space, their escapes and the punctuation within their values."""
    names = ["text", *data.draw(st.lists(NAMES, max_size=4))]
    members = []
    for name in names:
        value = data.draw(VALUES[name])
        written = json.dumps(value, ensure_ascii=data.draw(st.booleans()))
        key = data.draw(st.sampled_from([name, f"\\u{ord(name[0]):04x}{name[1:]}"]))
        space = [data.draw(WHITESPACE) for _ in range(4)]
        members.append((f'{space[0]}"{key}"{space[1]}:{space[2]}{written}{space[3]}', name, value))
    raw = ("{" + ",".join(text for text, *_ in members) + "}").encode()
    if len(set(names)) == len(names):
        expected: dict[str, Any] = {name: value for _, name, value in members}
        body = parse(raw)
        assert {name: getattr(body, name) for name in expected} == expected
    else:
        with pytest.raises(InvalidRequest, match="is sent twice"):
            parse(raw)


def test_the_time_to_parse_a_text_grows_with_its_length_alone() -> None:
    """Text with a quote or a line's end every 15 characters. The best of many; four times the length, eight times the
    time at most."""
    chapter = 'The old man said "no".\nThen he ' * 1_000
    short, long = (json.dumps({"text": text, "number": 0.8, "count": 5}).encode() for text in (chapter, 4 * chapter))
    assert min(_parse_s(long) for _ in range(200)) < 8 * min(_parse_s(short) for _ in range(200))


def _parse_s(body: bytes) -> float:
    started = time.perf_counter()
    parse(body)
    return time.perf_counter() - started


class Inner(Struct, forbid_unknown_fields=True, kw_only=True):
    size: Annotated[int | None, Meta(description="a whole number")] = None
    words: Annotated[list[str], Meta(description="a list of words")] = []


class Outer(Struct, kw_only=True):
    inner: Annotated[Inner | None, Meta(description="an object")] = None


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"inner": 1}', "inner"),
        (b'{"inner": {"size": 0.5}}', "inner.size"),
        (b'{"inner": {"size": "secret"}}', "inner.size"),
        (b'{"inner": {"words": ["a", 1]}}', "inner.words"),
        (b'{"inner": {"weight": 1}}', "inner.weight"),
    ],
)
def test_a_wrong_field_of_an_object_in_the_body_is_named(raw: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BodyParser(Outer)(raw)
    assert "secret" not in caught.value.detail
    assert [wrong.field for wrong in caught.value.fields] == [field]


def test_a_null_is_as_leaving_the_field_out() -> None:
    assert parse(b'{"text": "a", "number": null, "amount": null, "words": null}') == parse(b'{"text": "a"}')
    with pytest.raises(InvalidRequest, match="text is required"):
        parse(b'{"text": null}')
    with pytest.raises(InvalidRequest, match="Unknown field other"):
        parse(b'{"text": "a", "other": null}')


def test_a_neutral_value_is_as_leaving_the_field_out_and_has_its_own_type() -> None:
    """0 is not false: `logprobs: 0` wants the chosen tokens, `logprobs: false` nothing."""
    lenient = BodyParser(Body, {"amount": "count"}, {"count": (False,), "amount": (-1,), "words": ("",)})
    assert lenient(b'{"text": "a", "count": false, "words": ""}') == lenient(b'{"text": "a"}')
    assert lenient(b'{"text": "a", "amount": -1}').count == 0
    assert lenient(b'{"text": "a", "amount": 0, "count": false}').count == 0
    for wrong in (b'{"text": "a", "count": -1}', b'{"text": "a", "count": true}', b'{"text": "a", "words": 0}'):
        with pytest.raises(InvalidRequest):
            lenient(wrong)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        *((rb"\ude00 went", "\ufffd went"), (rb"I \ud83d cats", "I \ufffd cats"), (rb"cut \uD83D", "cut \ufffd")),
        *((rb"\udc00\ud800", "\ufffd\ufffd"), (rb"\n\ud83d\n", "\n\ufffd\n"), (rb"\\\ud83d", "\\\ufffd")),
        *((rb"\ud83d\ud83d\ude00", "\ufffd\U0001f600"), (rb"\ud83d\ude00\ude00", "\U0001f600\ufffd")),
        (rb"\\ud83d", "\\ud83d"),  # an escaped backslash, and letters
        *((b"\xed\xa0\xbd", "\ufffd"), (b"\xed\x9f\xbf\xed\xb8\x80", "\ud7ff\ufffd")),  # as some clients encode it
    ],
)
def test_half_of_a_surrogate_pair_is_the_replacement_character(raw: bytes, text: str) -> None:
    assert parse(b'{"text": "%s"}' % raw).text == text
    assert parse(b'{"text": "a", "words": ["%s"]}' % raw).words == [text]
    # Also in a name, where it is an unknown field.
    with pytest.raises(InvalidRequest, match="Unknown field"):
        parse(b'{"text": "a", "%s": 1}' % raw)
