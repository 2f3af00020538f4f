"""Workers that lie: servers on a slot's socket that speak the internal protocol and send what cannot be true."""

from __future__ import annotations

import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from shared import wire
from shared.protocol import Accepted, Failed, GenerateRequest, State, Token, Top
from tests.gateway.generation.stubs import completion, make_done
from tests.gateway.pool.helpers import END, HEAD, chunk, line, read_request

Lie: TypeAlias = Callable[[GenerateRequest, random.Random], Iterable[bytes]]
STATE_PERIOD_S = 0.1
ACCEPTED = HEAD + line(Accepted())
_TOKEN = line(Token(text=" a", token_id=0, logprob=-1.0, token_text=" a", begin=0, tops=[]))


def _without_end(data: bytes) -> Iterator[bytes]:
    return itertools.chain([ACCEPTED], itertools.repeat(data))


def _dones(**changes: Any) -> Lie:
    """An answer whose last line has these fields."""

    def lie(request: GenerateRequest, _rng: random.Random) -> Iterator[bytes]:
        texts = [" a", " b"]
        scores = {} if request.logprobs is None else {"token_texts": texts, "tops": [[Top(0, " a", -1.0)]] * 2}
        yield ACCEPTED + line(make_done(texts, **{**scores, **changes})) + END

    return lie


def _coded(_request: GenerateRequest, rng: random.Random) -> Iterator[bytes]:
    yield ACCEPTED + line(Failed(code=f"c{rng.getrandbits(32)}", detail="d" * 10_000)) + END


def _dripped(data: bytes) -> Iterator[bytes]:
    for byte in itertools.chain(data, itertools.repeat(120)):
        yield bytes([byte])
        time.sleep(0.02)


def fuzzed(request: GenerateRequest, rng: random.Random) -> Iterator[bytes]:
    """A right answer in which some bytes are changed, doubled or missing."""
    data = bytearray(HEAD + b"".join(map(line, completion(request, " the sea was calm."))) + END)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data))
        width = rng.choice((1, 1, 8, 64))
        data[at : at + width] = rng.choice((b"", rng.randbytes(width), bytes(data[at : at + width]) * 2))
    yield bytes(data)


LIES: dict[str, Lie] = {
    "tokens without end": lambda *_: _without_end(_TOKEN * 500),
    "lines without end": lambda *_: _without_end(line(Accepted()) * 2000),
    "a line of 6 MB": lambda *_: [ACCEPTED, chunk(b'{"event":"done","text":"' + b"x" * (6 << 20) + b'"}\n'), END],
    "a chunk's extension without end": lambda *_: _without_end(b"1;" + b"x" * 65536),
    "a head without end": lambda *_: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"X: y\r\n" * 9999)),
    "a head that drips": lambda *_: _dripped(b"HTTP/1.1 200 OK\r\nX: "),
    "deeply nested": lambda *_: [ACCEPTED, chunk(b"[" * 10_000 + b"\n"), END],
    "ends too short": _dones(ends=[2]),
    "ends that descend": _dones(ends=[4, 2]),
    "num_kept_tokens wrong": _dones(num_kept_tokens=99),
    "unknown tokens": _dones(token_ids=[10**9, 10**9]),
    "an unknown finish_reason": _dones(finish_reason="x" * 1000),
    "times that cannot be": _dones(queue_ms=-1e300),
    "new codes": _coded,
    "bytes changed": fuzzed,
}
STATE_LIES: dict[str, bytes] = {
    "a state out of range": line(State(state="warm", n_ctx=-5)),
    "states without end": line(State(state="warm")) * 5000,
    "a state without end": chunk(b"x" * (wire.MAX_STATE_BYTES + 1)),
}


class LyingWorker:
    """One slot's worker; it listens until `close`.

    Attributes:
        state: what it reports.
        num_lies: answers that were lies.
    """

    def __init__(
        self, path: Path, choose: Callable[[random.Random], Lie], state_lie: bytes = b"", seed: int = 0
    ) -> None:
        """
        Args:
            choose: the lie of the next answer.
            state_lie: sent after the first warm state.
        """
        self.state = State(state="loading")
        self.num_lies = 0
        self._choose, self._state_lie, self._rng = choose, state_lie, random.Random(seed)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            head, _, body = read_request(connection).partition(b"\r\n\r\n")
            if head.startswith(b"GET /state"):
                self._report(connection)
            else:
                self.num_lies += 1
                for part in self._choose(self._rng)(wire.parse_generate_request(body), self._rng):
                    connection.sendall(part)

    def _report(self, connection: socket.socket) -> None:
        connection.sendall(HEAD)
        while True:
            connection.sendall(line(self.state))
            if self._state_lie and self.state.state == "warm":
                self.num_lies += 1
                connection.sendall(self._state_lie)
            time.sleep(STATE_PERIOD_S)
