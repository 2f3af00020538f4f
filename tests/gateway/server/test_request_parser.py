"""Requests of HTTP: what is read, what is refused, and that no two readers could see another end of a request."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from gunicorn.config import Config
from gunicorn.http import get_parser
from gunicorn.http.errors import NoMoreData, ParseException
from hypothesis import given
from hypothesis import strategies as st

from gateway.server.request_parser import (
    MAX_CHUNK_LINES_BYTES,
    MAX_FIELDS,
    MAX_FIELDS_BYTES,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    MIN_CHUNK_LINES_BYTES,
    Request,
    RequestParser,
)
from shared.errors import HeadersTooLarge, MalformedRequest, TercetError, UrlTooLong

MAX_BYTES = 1000
CHUNKED = b"Transfer-Encoding: chunked"


def head(*fields: bytes, line: bytes = b"POST /a HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"Host: h", *fields, b"", b""])


def in_pieces(data: bytes, size: int) -> Iterable[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def read(pieces: Iterable[bytes]) -> tuple[list[Request], TercetError | None]:
    """The requests, and why no more was read."""
    parser = RequestParser(MAX_BYTES)
    requests: list[Request] = []
    try:
        for piece in pieces:
            is_complete = parser.advance(piece)
            while is_complete:
                requests.append(parser.take())
                if not requests[-1].keeps_connection:
                    return requests, None
                is_complete = parser.advance()
    except TercetError as error:
        return requests, error
    return requests, None


def read_one(data: bytes) -> Request:
    """The only request, however it arrives."""
    (requests, refusal), *others = [read(in_pieces(data, size)) for size in (len(data), 1, 7)]
    assert refusal is None
    assert others == [(requests, None)] * 2
    [request] = requests
    return request


def test_a_request_is_read_however_it_arrives() -> None:
    data = head(b"Content-Length: 2 ", b"X-A:  b c\t", b"cookie: a", b"Cookie: b", b"X_A: no", b"Empty:") + b"{}"
    request = read_one(b"\r\n" + data)
    assert request.head.raw == data[:-2]
    assert (request.head.method, request.head.path, request.head.query) == ("POST", "/a", "")
    assert request.head.fields == {
        "HTTP_HOST": "h",
        "CONTENT_LENGTH": "2",
        "HTTP_X_A": "b c",
        "HTTP_COOKIE": "a,b",
        "HTTP_EMPTY": "",
    }
    assert (request.body, request.head.content_length, request.keeps_connection) == (b"{}", 2, True)


@pytest.mark.parametrize(
    ("target", "host", "path", "query"),
    [
        (b"/a?b=c?d", "h", "/a", "b=c?d"),
        (b"//a/%20b", "h", "//a/%20b", ""),
        (b'/"<>\\^`{|}', "h", '/"<>\\^`{|}', ""),
        (b"http://other:80/a?b", "other:80", "/a", "b"),
        (b"HTTPS://other?b", "other", "/", "b"),
        (b"http://u:p@other", "u:p@other", "/", ""),
    ],
)
def test_the_parts_of_a_target_and_the_host_of_an_absolute_one(target: bytes, host: str, path: str, query: str) -> None:
    read = read_one(head(line=b"GET %s HTTP/1.1" % target)).head
    assert (read.target, read.path, read.query, read.fields["HTTP_HOST"]) == (target.decode(), path, query, host)


@pytest.mark.parametrize(
    ("version", "fields", "keeps_connection"),
    [
        (b"1.1", [], True),
        (b"1.1", [b"Connection: xclose"], True),
        (b"1.1", [b"Connection: close"], False),
        (b"1.1", [b"Connection: TE, Close"], False),
        (b"1.1", [b"Connection: keep-alive", b"Connection: close"], False),
        (b"1.0", [], False),
        (b"1.0", [b"Connection: Keep-Alive"], True),
    ],
)
def test_a_connection_is_kept_as_its_client_wants(version: bytes, fields: list[bytes], keeps_connection: bool) -> None:
    assert read_one(head(*fields, line=b"GET / HTTP/" + version)).keeps_connection is keeps_connection


@pytest.mark.parametrize("framing", [b"Content-Length: 5", CHUNKED])
@pytest.mark.parametrize(
    "fields",
    [
        [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB"],
        [b"Connection: Upgrade", b"Upgrade: websocket"],
    ],
)
def test_a_client_that_asks_for_another_protocol_is_read_as_if_it_had_not(framing: bytes, fields: list[bytes]) -> None:
    body = b"hello" if framing != CHUNKED else b"5\r\nhello\r\n0\r\n\r\n"
    requests, refusal = read([head(*fields, framing) + body + head(line=b"GET /next HTTP/1.1")])
    assert refusal is None
    assert [(request.head.path, request.body) for request in requests] == [("/a", b"hello"), ("/next", b"")]
    assert requests[0].head.fields["CONTENT_LENGTH"] == "5"


LINES = [
    *(b"GET / HTTP/0.9", b"GET / HTTP/1.2", b"GET / HTTP/2.0", b"GET / HTTP/9", b"GET /", b"GET / http/1.1"),
    *(b"GET / RTSP/1.0", b"DESCRIBE rtsp://h RTSP/1.0", b"SOURCE / ICE/1.0", b"PRI * HTTP/2.0"),
    *(b"GET  / HTTP/1.1", b"GET /  HTTP/1.1", b"GET / HTTP/1.1 ", b" GET / HTTP/1.1", b"GET\t/ HTTP/1.1"),
    *(b"\nGET / HTTP/1.1", b"\r\n\r\nGET / HTTP/1.1", b"GET / HTTP/1.1\nX: y", b"GET / HTTP/1.1\rX: y", b""),
    *(b"get / HTTP/1.1", b"FOO / HTTP/1.1", b"DESCRIBE / HTTP/1.1", b"CONNECT h:80 HTTP/1.1"),
    *(b"CONNECT / HTTP/1.1", b"CONNECT http://h/ HTTP/1.1"),
    *(b"GET /a#b HTTP/1.1", b"GET http://h/#b HTTP/1.1", b"GET * HTTP/1.1", b"GET h:80 HTTP/1.1", b"GET a HTTP/1.1"),
    *(b"GET ?a HTTP/1.1", b"GET ftp://h/ HTTP/1.1", b"GET http:///a HTTP/1.1", b"GET ://h HTTP/1.1"),
    *("GET /ä HTTP/1.1".encode(), b"GET /\0 HTTP/1.1", b"GET /\x7f HTTP/1.1", b"GET /\t HTTP/1.1"),
]
FIELDS = [
    *([b"Content-Length: 5", b"Content-Length: 5"], [b"content-length : 5"], [b"Content-Length: +5"]),
    *([b"Content-Length: 5, 5"], [b"Content-Length: 5 5"], [b"Content-Length: 0x5"], [b"Content-Length: -1"]),
    *([b"Content-Length:"], ["Content-Length: ٥".encode()], [b"Content-Length: " + b"9" * 30]),
    *([CHUNKED, b"Content-Length: 5"], [b"Content-Length: 0", CHUNKED], [CHUNKED, CHUNKED]),
    *([CHUNKED, b"Transfer-Encoding: identity"], [b"Transfer-Encoding: gzip", CHUNKED], [b"Transfer-Encoding:"]),
    *(
        [b"Transfer-Encoding: " + coding]
        for coding in (b"gzip, chunked", b"chunked, chunked", b"identity", b",chunked")
    ),
    *([b"Transfer-Encoding: chunked, identity"], [b"Transfer-Encoding: xchunked"]),
    *([b"Transfer-Encoding: \x0bchunked"], [b"Transfer-Encoding: chunked;q=1"], [b'Transfer-Encoding: "chunked"']),
    *([b"Transfer-Encoding : chunked"], [b"Transfer-Encoding:", b" chunked"], [b"X: y\n" + CHUNKED]),
    *([b"X: y", b" " + CHUNKED], [b"X: y", b"\tContent-Length: 7"], [b" X: y"], [b"X: y\rZ: a"], [b"X:", b" y"]),
    *([b"Host: h"], [b"Content-Type: a", b"Content-Type: b"], [b"Expect: more"], [b"no colon"], [b": a"]),
    *([b"A B: a"], [b"A\0: a"], [b"\xffA: a"], [b"X: \0"], [b"X: \x01"], [b"X: \x7f"], [b"X: a\x0bb"]),
]


@pytest.mark.parametrize(
    "data",
    [
        *[head(line=line) for line in LINES],
        *[head(*fields) for fields in FIELDS],
        head(CHUNKED, line=b"POST / HTTP/1.0"),
        head(b"Host: h", line=b"GET / HTTP/1.0"),
    ],
)
def test_a_head_that_two_readers_could_understand_in_two_ways_is_refused(data: bytes) -> None:
    for size in (len(data), 1):
        requests, refusal = read(in_pieces(data + b"0\r\n\r\n", size))
        assert not requests
        assert isinstance(refusal, MalformedRequest)


def test_a_head_of_64_kib_or_500_fields_is_read() -> None:
    for fields in ([b"Cookie: a=" + b"v" * 65_000], [b"X-%d: %s" % (number, b"v" * 100) for number in range(500)]):
        assert RequestParser(1000).advance(head(*fields))


def test_each_bound_of_a_head_is_exact() -> None:
    def of_line(num_bytes: int) -> bytes:
        return head(line=b"GET /" + b"x" * (num_bytes - len(b"GET / HTTP/1.1")) + b" HTTP/1.1")

    def of_fields(num_bytes: int) -> bytes:
        return head(b"X: " + b"x" * (num_bytes - len(b"Host: h\r\nX: \r\n")))

    def of_number(number: int) -> bytes:
        return head(*[b"X: y"] * (number - 1))

    for make, most, error in (
        (of_line, MAX_LINE_BYTES, UrlTooLong),
        (of_fields, MAX_FIELDS_BYTES, HeadersTooLarge),
        (of_number, MAX_FIELDS, HeadersTooLarge),
    ):
        assert read([make(most)])[1] is None
        requests, refusal = read([make(most + 1)])
        assert not requests
        assert isinstance(refusal, error)


def test_a_head_without_an_end_is_refused_before_much_of_it_is_held() -> None:
    parser = RequestParser(MAX_BYTES)
    assert not parser.advance(head(b"X: " + b"x" * (MAX_HEAD_BYTES - 100))[:-4])
    with pytest.raises(HeadersTooLarge):
        parser.advance(b"x" * 200)


# Bodies in chunks.

LONGEST = b"x" * (MIN_CHUNK_LINES_BYTES - 100)


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"0\r\n\r\n", b""),
        (b"000\r\n\r\n", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"5\r\nhello\r\n1\r\n \r\n0005\r\nworld\r\n0\r\n\r\n", b"hello world"),
        (b"A\r\n0\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n", b"0\r\n\r\n0\r\n\r\n"),
        (b"a\r\n\r\n\r\n\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n" * 5),
        (b"5;a\r\nhello\r\n0;last\r\n\r\n", b"hello"),
        (b'5;name="a; \\"b\\"";c=d\r\nhello\r\n0\r\n\r\n', b"hello"),
        (b"5;chunk-signature=" + b"a" * 64 + b"\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"2\r\n\r\n\r\n0\r\nContent-MD5: Q2hlY2s=\r\nExpires: 0\r\n\r\n", b"\r\n"),
        (b"2\r\n{}\r\n0\r\nContent-Length: 5\r\nConnection: upgrade\r\nUpgrade: h2c\r\nHost: evil\r\n\r\n", b"{}"),
        (b"1;" + LONGEST + b"\r\na\r\n0\r\n\r\n", b"a"),
        (b"0\r\nX:" + LONGEST + b"\r\n\r\n", b""),
        (b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n", b"x" * 1000),
        (b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n", b"x" * 1000),
    ],
)
def test_a_body_in_chunks_is_as_one_with_a_length(data: bytes, body: bytes) -> None:
    first = head(CHUNKED) + data
    second = head(line=b"GET /next HTTP/1.1")
    for size in (1, 2, 7, 10_000):
        requests, refusal = read(in_pieces(first + second, size))
        assert refusal is None
        assert [(request.head.path, request.body) for request in requests] == [("/a", body), ("/next", b"")]
        assert requests[0].head.fields == {"HTTP_HOST": "h", "CONTENT_LENGTH": str(len(body))}


@pytest.mark.parametrize(
    "data",
    [
        *(b"-5\r\nhello\r\n", b"+5\r\nhello\r\n", b"0x5\r\nhello\r\n", b"5_0\r\nhello\r\n", b"g\r\nhello\r\n"),
        *(b"\r\nhello\r\n", b";a\r\n\r\n", b"5 \r\nhello\r\n", b" 5\r\nhello\r\n", "٥\r\nhello\r\n".encode()),
        *(b"5\nhello\n0\n\n", b"5;a\nb\r\nhello\r\n", b"5;a\rb\r\nhello\r\n", b"5;\0\r\nhello\r\n"),
        *(b"5\r\nhello0\r\n\r\n", b"5\r\nhello!\r\n0\r\n\r\n", b"4\r\nhello\r\n0\r\n\r\n", b"6\r\nhello\r\n0\r\n\r\n"),
        *(b"5\r\nhello\n0\n\n", b"5\r\nhello\r\r\n0\r\n\r\n", b"1" + b"0" * 16 + b"\r\nhello\r\n"),
        *(b"0\r\nno field\r\n\r\n", b"0\r\n: a\r\n\r\n", b"0\r\nX : a\r\n\r\n", b"0\r\nX: a\r\n b\r\n\r\n"),
        *(b"0\r\nX: a\nY: b\r\n\r\n", b"0\r\nX: \0\r\n\r\n", b"0\r\n" + CHUNKED + b"\r\n\r\n"),
        *(b"5;" + b"x" * 5000, b"0" * 5000 + b"5", b"0\r\nX:" + b"x" * 5000, b"0\r\n" + b"X: y\r\n" * 1000),
    ],
)
def test_what_is_not_in_chunks_is_refused(data: bytes) -> None:
    for size in (1, 10_000):
        requests, refusal = read(in_pieces(head(CHUNKED) + data + b"\r\n", size))
        assert not requests
        assert isinstance(refusal, MalformedRequest)


def test_chunks_are_too_long_when_their_sum_is_and_no_more_is_held() -> None:
    parser = RequestParser(MAX_BYTES)
    assert not parser.advance(head(CHUNKED))
    for _ in range(10):
        assert not parser.advance(b"64\r\n" + b"x" * 100 + b"\r\n")
    assert parser.advance(b"7FFFFFFFFFFFFFFF\r\n" + b"x" * 100_000)
    request = parser.take()
    assert (request.body, request.keeps_connection) == (b"", False)
    assert MAX_BYTES < int(request.head.fields["CONTENT_LENGTH"]) < MAX_BYTES + 5000


def test_endless_extensions_are_refused_and_not_held() -> None:
    parser = RequestParser(MAX_BYTES)
    line = b"1;" + b"x" * 4000 + b"\r\na\r\n"
    assert not parser.advance(head(CHUNKED) + b"3e0\r\n" + b"x" * 0x3E0 + b"\r\n" + line)
    assert parser.num_bytes <= MAX_BYTES + 100
    with pytest.raises(MalformedRequest, match="larger chunks"):
        parser.advance(line * ((MAX_BYTES + MAX_CHUNK_LINES_BYTES) // len(line)))


# Any stream.

fields = st.one_of(
    st.integers(0, 40).map(lambda length: b"Content-Length: %d " % length),
    st.sampled_from([CHUNKED, b"transfer-encoding:\tCHUNKED ", b"Transfer_Encoding: chunked", b"Content_Length: 4"]),
    st.sampled_from([b"Connection: close", b"Expect: 100-continue", b"Connection: upgrade\r\nUpgrade: h2c"]),
    st.sampled_from(FIELDS).map(b"\r\n".join),
    st.binary(max_size=12),
)
lines = st.one_of(
    st.sampled_from([b"GET / HTTP/1.1", b"POST /a?b HTTP/1.1", b"POST /b HTTP/1.0"]),
    st.sampled_from(LINES),
    st.binary(max_size=6).map(lambda path: b"GET /" + path + b" HTTP/1.1"),
)
heads = st.tuples(lines, st.lists(fields, max_size=4)).map(lambda parts: b"\r\n".join([parts[0], *parts[1], b"", b""]))
bodies = st.binary(max_size=12) | st.sampled_from([b"abc", b"\r\n", b"0\r\n\r\n", b"GET /c HTTP/1.1\r\n\r\n"])
sizes = st.integers(0, 12).map(lambda n: b"%x" % n)
chunks = st.one_of(
    st.binary(max_size=12).map(lambda data: b"%x\r\n%s\r\n" % (len(data), data)),
    st.binary(max_size=300).map(lambda data: b"%03X;a=b\r\n%s\r\n" % (len(data), data)),
    st.tuples(sizes, st.binary(max_size=12)).map(lambda parts: b"%s\r\n%s\r\n" % parts),
    st.sampled_from([b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0;a\r\n\r\n", b"0\n\r\n", b"-1\r\n", b"400\r\n", b"0\r\n"]),
)
in_chunks = st.lists(chunks, max_size=4).map(b"".join)
whole = st.tuples(lines, in_chunks).map(lambda parts: b"%s\r\n%s\r\n\r\n%s0\r\n\r\n" % (parts[0], CHUNKED, parts[1]))
streams = st.lists(heads | bodies | in_chunks | whole, min_size=1, max_size=8).map(b"".join)


def read_by_gunicorn(stream: bytes) -> list[tuple[str, str, bytes]]:
    """Method, target and body of the requests that gunicorn's parser reads, up to the first that it refuses."""
    data = memoryview(stream)

    def recv(size: int) -> bytes:
        nonlocal data
        piece, data = data[:size], data[size:]
        return bytes(piece)

    requests = []
    try:
        for request in get_parser(Config(), SimpleNamespace(recv=recv), ("127.0.0.1", 0)):
            body = request.body.read()
            requests.append((request.method, request.uri, body))
    except (ParseException, NoMoreData, StopIteration):
        pass
    return requests


@given(stream=streams, cuts=st.lists(st.integers(1, 60), max_size=5))
def test_a_stream_is_split_where_an_independent_parser_splits_it_or_refused(stream: bytes, cuts: list[int]) -> None:
    requests, refusal = read([stream])
    pieces, rest = [], stream
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    again, refused_again = read([*pieces, rest])
    assert again == requests
    assert (refused_again and refused_again.code) == (refusal and refusal.code)
    found = [(request.head.method, request.head.target, request.body) for request in requests]
    expected = read_by_gunicorn(stream)
    assert found == expected[: len(found)]
    if refusal is None and all(request.keeps_connection for request in requests):
        assert len(expected) <= len(found) + 1  # one that is not complete
