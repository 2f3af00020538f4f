"""How much the server may hold: connections, requests of each class, and their bytes.

Derived from the limit of open files. Knows no connection and no HTTP.
"""

from __future__ import annotations

import os
import resource
import sys

from gateway.server.served_app import Work
from gateway.server.work_queue import WorkQueue

# Requests that are not complete yet, of all connections together; a connection that holds little is not refused.
MAX_BUFFERED_BYTES = 256 << 20
MAX_UNCOUNTED_BYTES = 8 << 10
# Descriptors kept free for log, metrics, state streams, and files that libraries open.
SPARE_DESCRIPTORS = 32
MAX_CONNECTIONS = 10_000
# Share of the remaining file descriptors for clients; the rest is for branch connections, three to a request.
CLIENT_SHARE = 0.6
# Threads for jobs, and for tokenizing: they wait for one store or worker. Those for jobs are all that a store which
# hangs can hold.
MAX_SMALL = 4
# Reads wait for nothing. The interpreter runs one thread at a time, so more of them would answer no more reads a
# second, and each would have its turn before a completion's thread.
MAX_READING = 1
# Health checks are answered in less than a millisecond. A balancer or SageMaker replaces a server that does not answer
# them in time, and its load moves to the others.
MAX_CHECKING = 2
# Requests of clients that send the next one before they have read the last response are answered by few threads, and
# after completions: no client in use does it, and a flood of them would cost the others their turn.
MAX_PIPELINING = 4
# A completion that finds no free thread for this long is refused. There are threads for all completions that may run or
# wait, so without one it would be refused anyway. Other requests wait as long as a request may take, without a thread.
MAX_READY_WAIT_S = 0.2
# Those for jobs wait as long as the most patient call of SQLite: where their threads are held longer, the store hangs.
STORE_WAIT_S = 2.0
# Share of the bytes that may be buffered which the requests of one class may have while they wait for a thread, 32 of
# the largest by default: all classes together leave a quarter to requests that are not complete. Of completions more
# wait, and briefly.
CLASS_SHARE, COMPLETIONS_SHARE = 1 / 8, 1 / 4
_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


def num_open_descriptors() -> int:
    return len(os.listdir(_DESCRIPTORS))


def max_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def divide_descriptors(max_connections: int, max_threads: int, timeout_s: float) -> tuple[int, dict[Work, WorkQueue]]:
    """How many connections may be open, and the queues of requests, so that descriptors suffice. Classes besides
    completions use few of the spare ones.

    Args:
        max_connections, max_threads: where descriptors suffice.
        timeout_s: how long a request may take.
    """
    free = max(16, max_descriptors() - num_open_descriptors() - SPARE_DESCRIPTORS)
    for_clients = min(MAX_CONNECTIONS, int(CLIENT_SHARE * free))
    max_connections = min(max_connections, for_clients)
    max_answering = max(2, min(max_threads, max_connections, (free - for_clients) // 3))
    of_class, of_completions = int(CLASS_SHARE * MAX_BUFFERED_BYTES), int(COMPLETIONS_SHARE * MAX_BUFFERED_BYTES)
    work = {Work.TOKENIZING: WorkQueue(MAX_SMALL, timeout_s, of_class)}
    work[Work.READS] = WorkQueue(MAX_READING, timeout_s, of_class)
    work[Work.JOBS] = WorkQueue(MAX_SMALL, min(STORE_WAIT_S, timeout_s), of_class)
    work[Work.COMPLETIONS] = WorkQueue(max_answering, MAX_READY_WAIT_S, of_completions)
    work[Work.HEALTH] = WorkQueue(MAX_CHECKING, timeout_s, MAX_UNCOUNTED_BYTES * max_connections)
    work[Work.PIPELINED] = WorkQueue(MAX_PIPELINING, float("inf"), of_class)
    return max_connections, work
