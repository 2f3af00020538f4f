"""Closed-loop clients that cost next to nothing: one thread, requests encoded before they are sent, answers not parsed.

For figures that the clients' own CPU time would hide. Knows HTTP framing and the clock.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import msgspec

from deploy.tuning.load.workload import PromptGenerator
from shared.errors import StartError
from workers.checkpoints.resolve import Checkpoint

READ_BYTES = 1 << 16
SILENCE_S = 30.0
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Load(msgspec.Struct, frozen=True):
    """What the clients did. `elapsed_s` is from their common start to the last answer."""

    num_answers: int
    elapsed_s: float
    client_cpu_s: float  # of all clients


class LoadClients:
    """Clients of one gateway; created in a process of its own."""

    def __init__(
        self, host: str, port: int, path: str, body: Mapping[str, Any], subject: Checkpoint, num_tokens: int, seed: int
    ) -> None:
        """
        Args:
            host, port: the gateway, on the loopback interface.
            path: path of the POST.
            body: fields of each request besides `context` and `seed`.
            subject: the model whose tokenizer counts the prompts' tokens.
            num_tokens: tokens of each prompt, which no request has sent before.
            seed: seed of the prompts.
        """
        self._address = host, port
        self._head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        self._body = body
        self._prompts = PromptGenerator(subject, seed)
        self._num_tokens = num_tokens
        self._requests: deque[bytes] = deque()

    def prepare(self, num_requests: int) -> None:
        """Encode requests before the clock runs; `send_for` encodes those that lack."""
        while len(self._requests) < num_requests:
            self._requests.append(self._new_request())

    def send_for(self, num_clients: int, seconds: float) -> Load:
        """Clients that start together and send requests for `seconds`; answers that lack then are awaited.

        Raises:
            StartError: an answer has another status than 200, a connection ended, or nothing came for `SILENCE_S`.
        """
        num_answers = 0
        with ExitStack() as stack:
            poll = stack.enter_context(select.epoll())
            clients = {}
            for _ in range(num_clients):
                client = stack.enter_context(socket.create_connection(self._address, SILENCE_S))
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                clients[client.fileno()] = client
            received = dict.fromkeys(clients, b"")
            start, cpu_start = time.perf_counter(), time.process_time()
            for fileno, client in clients.items():
                poll.register(fileno, select.EPOLLIN)
                client.sendall(self._next_request())
            while received:
                events = poll.poll(SILENCE_S)
                if not events:
                    raise StartError(f"The server under test sent nothing for {SILENCE_S:g} s.")
                for fileno, _ in events:
                    received[fileno] += clients[fileno].recv(READ_BYTES)
                    if not _is_complete(received[fileno]):
                        continue
                    num_answers += 1
                    if time.perf_counter() - start < seconds:
                        received[fileno] = b""
                        clients[fileno].sendall(self._next_request())
                    else:
                        del received[fileno]
            return Load(num_answers, time.perf_counter() - start, time.process_time() - cpu_start)

    def _next_request(self) -> bytes:
        return self._requests.popleft() if self._requests else self._new_request()

    def _new_request(self) -> bytes:
        fields = {**self._body, "context": self._prompts.text(self._num_tokens), "seed": self._prompts.seed()}
        body = json.dumps(fields)
        return f"{self._head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def _is_complete(received: bytes) -> bool:
    """
    Raises:
        StartError: as `send_for`.
    """
    head, separator, body = received.partition(b"\r\n\r\n")
    if not received or (separator and not head.startswith(b"HTTP/1.1 200 ")):
        line = head.partition(b"\r\n")[0].decode("latin-1")
        raise StartError(f"The server under test answered {line or 'nothing'}.")
    length = _CONTENT_LENGTH.search(head) if separator else None
    return length is not None and len(body) >= int(length[1])
