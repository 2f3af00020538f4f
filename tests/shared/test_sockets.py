from __future__ import annotations

import select
import socket

import pytest

from shared.sockets import ONESHOT, Poller, PollPoller


@pytest.mark.parametrize("kind", [Poller, PollPoller])
def test_a_poller_reports_an_event_once_until_it_is_armed_again(kind: type[PollPoller]) -> None:
    poller, (ours, theirs) = kind(), socket.socketpair()
    with ours, theirs:
        theirs.send(b"x")
        poller.register(ours.fileno(), 0)
        for _ in range(2):
            poller.modify(ours.fileno(), select.POLLIN | ONESHOT)
            assert poller.poll(5) == [(ours.fileno(), select.POLLIN)]
            assert poller.poll(0.1) == []
