"""Framing: `Connection` splits a byte stream into requests exactly where gunicorn's parser does, or stops before."""

from __future__ import annotations

import socket

from gunicorn.config import Config
from gunicorn.http import get_parser
from gunicorn.http.errors import NoMoreData, ParseException
from hypothesis import given
from hypothesis import strategies as st

from gateway.server.connections import Connection, RequestSource, Step

Parsed = tuple[str, str, bytes]

lengths = st.one_of(
    st.integers(0, 40).map(lambda n: b"%d" % n),
    st.sampled_from([b"+3", b"-1", b" 3", b"3 ", b"03", b"3,3", b"0x3", b"", b"3\t", b"99999999999999999999"]),
)
chunked = b"Transfer-Encoding: chunked"
fields = st.one_of(
    lengths.map(lambda value: b"Content-Length: " + value),
    lengths.map(lambda value: b"content-length:" + value),
    st.sampled_from(
        [
            *(b"Host: a", chunked, b"Transfer-Encoding : identity", b"Content-Length : 4"),
            *(chunked, b"transfer-encoding:\tCHUNKED ", b"Transfer-Encoding: gzip, chunked", chunked + b", chunked"),
            *(b"X: 1\r\n " + chunked, b"X: 1\n" + chunked, b"Transfer_Encoding: chunked", b"Transfer-Encoding:"),
            *(b" Content-Length: 4", b"X: Content-Length: 4", b"X: 1\r\n\tContent-Length: 4", b"Content_Length: 4"),
            *(b"X: 1\nContent-Length: 4", b"Connection: close", b"Expect: 100-continue", b"\x00: 1"),
        ]
    ),
)
lines = st.sampled_from([b"GET / HTTP/1.1", b"POST /a HTTP/1.1", b"POST /b HTTP/1.0", b"get / HTTP/1.1", b"GET /", b""])
heads = st.tuples(lines, st.lists(fields, max_size=4)).map(lambda head: b"\r\n".join([head[0], *head[1], b"", b""]))
bodies = st.binary(max_size=12) | st.sampled_from([b"abc", b"\r\n", b"0\r\n\r\n", b"GET /c HTTP/1.1\r\n\r\n"])
sizes = st.integers(0, 12).map(lambda n: b"%x" % n)
chunks = st.one_of(
    st.binary(max_size=12).map(lambda data: b"%x\r\n%s\r\n" % (len(data), data)),
    st.binary(max_size=300).map(lambda data: b"%03X ;a=b\r\n%s\r\n" % (len(data), data)),
    st.tuples(sizes, st.binary(max_size=12)).map(lambda parts: b"%s\r\n%s\r\n" % parts),
    st.sampled_from([b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0;a\r\n\r\n", b"0\n\r\n", b"-1\r\n", b"400\r\n", b"0\r\n"]),
)
in_chunks = st.lists(chunks, max_size=4).map(b"".join)
whole = st.tuples(lines, in_chunks).map(lambda parts: b"%s\r\n%s\r\n\r\n%s0\r\n\r\n" % (parts[0], chunked, parts[1]))
streams = st.lists(heads | bodies | in_chunks | whole, min_size=1, max_size=8).map(b"".join)


def parsed_by_gunicorn(stream: bytes) -> list[Parsed]:
    """The requests that gunicorn's parser reads from the whole stream, up to the first that it refuses."""
    parser = get_parser(Config(), RequestSource(stream), ("127.0.0.1", 0))
    requests: list[Parsed] = []
    try:
        for request in parser:
            body = request.body.read()
            requests.append((request.method, request.uri, body))
    except (ParseException, NoMoreData, StopIteration):
        pass
    return requests


def parsed_by_us(stream: bytes, pieces: list[int]) -> tuple[list[Parsed], bool]:
    """The requests that the connection hands over, parsed one by one, and whether it refused to split further."""
    ours, theirs = socket.socketpair()
    requests: list[Parsed] = []
    with ours, theirs:
        theirs.setblocking(False)
        connection = Connection(ours, "", "", now=0.0, max_body_bytes=1000, tls=None)
        start = 0
        for size in [*pieces, len(stream)]:
            theirs.send(stream[start : start + size])
            start += size
            step = connection.advance(0.0)
            while step is Step.ANSWER:
                data = connection.take_request(0.0)
                try:
                    request = next(get_parser(Config(), RequestSource(data), ("127.0.0.1", 0)))
                except (ParseException, NoMoreData, StopIteration):
                    return requests, True
                if connection.is_last_request:
                    return requests, True
                requests.append((request.method, request.uri, request.body.read()))
                if request.should_close():
                    return requests, True
                step = connection.finish_response(0.0, keeps_connection=True)
            if step is Step.REFUSE_BODY:
                return requests, True
            if step is Step.CLOSE or start >= len(stream):
                break
    return requests, False


@given(stream=streams, pieces=st.lists(st.integers(1, 60), max_size=5))
def test_both_parsers_see_the_same_requests(stream: bytes, pieces: list[int]) -> None:
    expected = parsed_by_gunicorn(stream)
    requests, is_refused = parsed_by_us(stream, pieces)
    assert requests == expected[: len(requests)]
    # What we did not hand over, gunicorn would have read from an incomplete or a refused request only.
    if not is_refused:
        assert len(expected) <= len(requests) + 1
