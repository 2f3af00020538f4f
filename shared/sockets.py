"""What systems other than Linux lack or name differently around sockets. Knows descriptors, not what they belong to."""

from __future__ import annotations

import select
import socket

ONESHOT = 1 << 30  # EPOLLONESHOT: a descriptor has no further event until `modify`
PEER_CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)  # macOS reports POLLHUP then, if asked for it
TCP_KEEPIDLE = getattr(socket, "TCP_KEEPIDLE", 0x10)  # TCP_KEEPALIVE in macOS's <netinet/tcp.h>


class PollPoller(dict[int, int]):
    """What Tercet uses of `select.epoll`, by poll(2): events by descriptor. Changes take effect with the next poll, so
    none takes long: other threads make them."""

    MAX_POLL_S = 0.02

    register = modify = dict.__setitem__
    unregister = dict.__delitem__

    def poll(self, timeout_s: float = MAX_POLL_S, _max_events: int = -1) -> list[tuple[int, int]]:
        """All events: in the order of poll(2), the first few might be those of the same descriptors each time."""
        poll = select.poll()
        for fd, events in self.copy().items():
            if events:
                poll.register(fd, events & ~ONESHOT)
        found = poll.poll(1e3 * min(timeout_s, self.MAX_POLL_S))
        self |= {fd: 0 for fd, _ in found if self.get(fd, 0) & ONESHOT}
        return found


Poller: type[PollPoller] = getattr(select, "epoll", PollPoller)
