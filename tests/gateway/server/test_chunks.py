"""Chunked bodies: what is decoded, what is refused, and how much of a hostile one is kept."""

from __future__ import annotations

import pytest

from gateway.server.chunks import MAX_LINE_BYTES, MAX_LINES_BYTES, ChunkedBody, InvalidChunks

MAX_BYTES = 1000
LONGEST = b"x" * MAX_LINE_BYTES


def decode(data: bytes, piece: int) -> ChunkedBody:
    chunks = ChunkedBody(MAX_BYTES)
    for start in range(0, len(data), piece):
        chunks.feed(data[start : start + piece])
    return chunks


@pytest.mark.parametrize("piece", [1, 2, 7, 10_000])
@pytest.mark.parametrize(
    ("data", "body"),
    [
        (b"0\r\n\r\n", b""),
        (b"000\r\n\r\n", b""),
        (b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"5\r\nhello\r\n1\r\n \r\n0005\r\nworld\r\n0\r\n\r\n", b"hello world"),
        (b"A\r\n0\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n", b"0\r\n\r\n0\r\n\r\n"),
        (b"a\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
        (b"5;a\r\nhello\r\n0;last\r\n\r\n", b"hello"),
        (b'5 ; name="a; \\"b\\"" ;c=d\r\nhello\r\n0\r\n\r\n', b"hello"),
        (b"5;chunk-signature=" + b"a" * 64 + b"\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"2\r\n\r\n\r\n0\r\nContent-MD5: Q2hlY2s=\r\nExpires: 0\r\n\r\n", b"\r\n"),
        (b"2\r\n{}\r\n0\r\nContent-Length: 5\r\nHost: evil.example\r\n\r\n", b"{}"),
        (b"1;" + LONGEST[2:] + b"\r\na\r\n0\r\nX:" + LONGEST[2:] + b"\r\n\r\n", b"a"),
        (b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n", b"x" * 1000),
    ],
)
def test_a_body_is_decoded_however_it_arrives(data: bytes, body: bytes, piece: int) -> None:
    chunks = decode(data + b"GET /", piece)
    assert chunks.is_complete
    assert (bytes(chunks.body), bytes(chunks.rest)) == (body, b"GET /")
    for end in range(0, len(data), 1 + len(data) // 50):
        assert not decode(data[:end], 10_000).is_complete


@pytest.mark.parametrize("piece", [1, 10_000])
@pytest.mark.parametrize(
    "data",
    [
        *(b"-5\r\nhello\r\n", b"+5\r\nhello\r\n", b"0x5\r\nhello\r\n", b"5_0\r\nhello\r\n", b"g\r\nhello\r\n"),
        *(b"\r\nhello\r\n", b";a\r\n\r\n", b"5 \r\nhello\r\n", b" 5\r\nhello\r\n", "٥\r\nhello\r\n".encode()),
        *(b"5\nhello\n0\n\n" + LONGEST, b"5;a\nb\r\nhello\r\n", b"5;a\rb\r\nhello\r\n", b"5;\0\r\nhello\r\n"),
        b"00000000000000005\r\nhello\r\n",
        *(b"5\r\nhello0\r\n\r\n", b"5\r\nhello!\r\n0\r\n\r\n", b"4\r\nhello\r\n0\r\n\r\n", b"6\r\nhello\r\n0\r\n\r\n"),
        *(b"5\r\nhello\n0\n\n", b"5\r\nhello\r\r\n0\r\n\r\n"),
        *(b"0\r\nno field\r\n\r\n", b"0\r\n: a\r\n\r\n", b"0\r\nX : a\r\n\r\n", b"0\r\nX: a\r\n b\r\n\r\n"),
        *(b"0\r\nX: a\nY: b\r\n\r\n", b"0\r\nX: \0\r\n\r\n"),
        *(b"5;" + LONGEST, b"0" * MAX_LINE_BYTES + b"5", b"0\r\nX:" + LONGEST),
    ],
)
def test_what_is_not_in_chunks_is_refused(data: bytes, piece: int) -> None:
    with pytest.raises(InvalidChunks, match=r"\.$"):
        decode(data + b"\r\n", piece)


@pytest.mark.parametrize("size", [b"3e9", b"FFFFFFFFFFFFFFFF", b"00000000000003e9"])
def test_a_chunk_above_the_limit_is_too_large_before_it_arrives(size: bytes) -> None:
    assert decode(size + b"\r\n", 1).is_too_large


def test_many_chunks_are_too_large_when_their_sum_is_and_no_more_is_kept() -> None:
    chunks = ChunkedBody(MAX_BYTES)
    for _ in range(11):
        chunks.feed(b"64\r\n" + b"x" * 100 + b"\r\n")
    assert chunks.is_too_large
    assert len(chunks.body) == MAX_BYTES


@pytest.mark.parametrize(
    ("start", "line"),
    [(b"", b"1;" + b"x" * 1000 + b"\r\na\r\n"), (b"0\r\n", b"X: " + b"x" * 1000 + b"\r\n")],
    ids=["extensions", "trailers"],
)
def test_endless_extensions_and_trailers_are_refused(start: bytes, line: bytes) -> None:
    chunks = ChunkedBody(MAX_BYTES)
    chunks.feed(start)
    for _ in range((MAX_LINES_BYTES + MAX_BYTES) // len(line)):
        chunks.feed(line)
        assert chunks.num_buffered_bytes <= MAX_BYTES
    with pytest.raises(InvalidChunks, match="too long"):
        chunks.feed(2 * line)
