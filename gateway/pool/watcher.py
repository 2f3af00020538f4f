"""Follows the state of every slot: one thread per slot reads the worker's state stream into `Admission`.

The end of the stream means that the worker is down. Nothing else shows it as early: the pool's master keeps the
listening socket of a dead worker, so a connect would succeed and then wait.

A worker that drains says so before it ends its stream, and finishes its branches. If the stream ends in any other way,
or is silent, the branches in progress are ended too, so that they are retried elsewhere and do not wait for a stopped
process until their deadline. A stream of states that cannot be true ends like that, too, and is tried again after a
while.

Slots of other machines come and go with the addresses of their host names. A slot whose address is gone gets no further
branches, finishes those that it has, and is removed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing
from functools import partial

import msgspec
import structlog

from gateway.pool.access import RemoteAccess
from gateway.pool.admission import Admission
from gateway.pool.client import BranchError, SlotClient
from gateway.pool.discovery import INTERVAL_S, Discovery, Resolver, resolve
from shared.plan import Plan, Remote, Slot
from shared.protocol import OLDEST_PROTOCOL, PROTOCOL, State
from shared.setting_values import PoolUrl
from shared.version import tercet_version

RECONNECT_S = 0.05
# A machine that cannot be reached is tried again after 0.05, 0.1, ... at most this time.
MAX_RECONNECT_S = 1.0
# Where the certificate, the key or the model is wrong, an operator must act first.
MISCONFIGURED_RECONNECT_S = 5.0
MISCONFIGURED = "misconfigured"
# Slots of one host name. A name may have any number of addresses, each with every port, and each slot has a thread.
MAX_HOST_SLOTS = 1024
_FAILURES = "failures."  # these keys of `State.counters`
log = structlog.get_logger()


class FailureTotals:
    """A slot's failures over all of its workers. A fatal one ends its worker before any scrape of the metrics."""

    def __init__(self) -> None:
        self._earlier: Counter[str] = Counter()  # of workers before the current
        self._current: Counter[str] = Counter()
        self._pid = 0

    def added_to(self, state: State) -> State:
        """The worker's state with the failures of the slot's earlier workers added."""
        if state.pid != self._pid:
            self._earlier += self._current
            self._pid, self._current = state.pid, Counter()
        if state.state != "down":
            counts = {key: count for key, count in state.counters.items() if key.startswith(_FAILURES)}
            self._current = Counter({key: int(count) for key, count in counts.items()})
        return msgspec.structs.replace(state, counters={**state.counters, **(self._earlier + self._current)})


class PoolWatcher:
    """Starts its threads, which run until the process exits: one for each slot, and one for each host name of a pool.

    Attributes:
        clients: clients by slot index. A slot of another machine has one from before it is in `Admission` until after
            it has left there.
    """

    def __init__(
        self,
        plan: Plan,
        admission: Admission,
        ack_s: float,
        pool: Sequence[PoolUrl] = (),
        access: RemoteAccess | None = None,
        resolver: Resolver = resolve,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """
        Args:
            ack_s: how long a call waits for the worker's acknowledgement.
            pool: where slots of other machines are reached.
            access: key and TLS settings for these slots.
            interval_s: interval at which host names are looked up.
        """
        self.clients: dict[int, SlotClient] = {}
        self._admission = admission
        self._ack_s = ack_s
        self._access = access
        # Guards the slots of other machines: by URL, address and port.
        self._lock = threading.Lock()
        self._indices: dict[tuple[PoolUrl, str, int], int] = {}
        self._next_index = len(plan.slots)
        for slot in plan.slots:
            self._make_client(slot)
            self._start(slot)
        for host in dict.fromkeys(url.host for url in pool):
            urls = [url for url in pool if url.host == host]
            Discovery(host, partial(self._set_addresses, urls), resolver, interval_s)

    def _make_client(self, slot: Slot) -> None:
        self.clients[slot.index] = SlotClient(slot, self._ack_s, self._access)

    def _start(self, slot: Slot) -> None:
        threading.Thread(target=self._follow, args=(slot,), name=f"state-{slot.index}", daemon=True).start()

    def _set_addresses(self, urls: Sequence[PoolUrl], addresses: Collection[str]) -> None:
        """Add slots at new addresses of a host, up to `MAX_HOST_SLOTS`, and let those at other addresses leave."""
        num_ports = sum(url.last_port - url.port + 1 for url in urls)
        used = sorted(addresses)[: max(1, MAX_HOST_SLOTS // num_ports)]
        if len(used) < len(addresses):
            log.warning("addresses_left_out", host=urls[0].host, num_used=len(used), num_found=len(addresses))
        wanted = dict.fromkeys(
            (url, address, port) for url in urls for address in used for port in range(url.port, url.last_port + 1)
        )
        with self._lock:
            for key, index in self._indices.items():
                if key[0] in urls:
                    self._admission.set_leaving(index, key not in wanted)
            for key in wanted:
                if key in self._indices:
                    continue
                url, address, port = key
                remote = Remote(url.scheme, url.host, address, port, url.path)
                slot = Slot(self._next_index, "", url.model, "", 0, remote=remote)
                self._start(slot)  # raises RuntimeError where no thread can be started; it waits for the lock
                self._indices[key] = slot.index
                self._next_index += 1
                self._make_client(slot)
                self._admission.add(slot)
                log.info("slot_added", slot=slot.index, model=slot.model, host=url.host, address=str(remote))

    def _remove_if_left(self, slot: Slot) -> bool:
        """Remove a slot whose address is gone, once no branch runs there."""
        with self._lock:
            if not self._admission.remove(slot.index):
                return False
            self._indices = {key: index for key, index in self._indices.items() if index != slot.index}
        self.clients.pop(slot.index).close()
        log.info("slot_removed", slot=slot.index, model=slot.model, address=str(slot.remote))
        return True

    def _follow(self, slot: Slot) -> None:
        """Until the slot is removed."""
        with self._lock:
            pass  # the slot is in `clients` now
        failures = FailureTotals()
        num_failures = 0  # attempts in a row without a worker that stays
        while True:
            reason, code = "its worker closed the state stream", ""
            last: State | None = None
            try:
                with closing(self.clients[slot.index].states()) as states:
                    for state in states:
                        _check_protocol(state)
                        if slot.remote is not None:
                            _check_model(slot, state)
                            if self._remove_if_left(slot):
                                return
                        self._admission.update(slot.index, failures.added_to(state))
                        if last is None or state.state != last.state:
                            log.info(
                                "slot_state_changed",
                                slot=slot.index,
                                state=state.state,
                                reason=state.reason,
                                pid=state.pid,
                            )
                        last = state
            except BranchError as error:
                reason, code = error.detail, error.code
            if slot.remote is not None and self._remove_if_left(slot):
                return
            # A worker that drains still answers, and ends each stream.
            num_failures = 0 if last is not None and last.state != "draining" else num_failures + 1
            if last is not None:
                self._admission.update(slot.index, failures.added_to(State(state="down", reason=reason, pid=last.pid)))
                if last.state != "draining":
                    self.clients[slot.index].abort_calls(BranchError("slot_lost", f"Its worker was lost: {reason}"))
                log.warning("slot_lost", slot=slot.index, reason=reason)
            elif slot.remote is not None or code == MISCONFIGURED:
                self._note_unreachable(slot, reason)
            else:
                # A worker of this machine will be replaced, and its first reason says most.
                self._admission.reexamine()
            time.sleep(RECONNECT_S if slot.remote is None else _pause_s(code, num_failures))

    def _note_unreachable(self, slot: Slot, reason: str) -> None:
        state = self._admission.states()[slot.index]
        # An update also refuses requests whose model is no longer expected.
        self._admission.update(slot.index, msgspec.structs.replace(state, state="down", reason=reason))
        if state.reason != reason:
            log.warning("slot_unreachable", slot=slot.index, address=str(slot.remote or ""), reason=reason)


def _check_protocol(state: State) -> None:
    """
    Raises:
        BranchError: the worker is of a version that this one does not work with.
    """
    if state.protocol < OLDEST_PROTOCOL or state.oldest_protocol > PROTOCOL:
        older = "worker" if state.protocol < OLDEST_PROTOCOL else "gateway"
        raise BranchError(
            MISCONFIGURED,
            f"The worker is of Tercet {state.version or '(an earlier version)'} (protocol {state.protocol}), this"
            f" gateway of {tercet_version()} (protocol {PROTOCOL}); they do not work together: upgrade the {older}.",
        )


def _check_model(slot: Slot, state: State) -> None:
    """
    Raises:
        BranchError: the worker holds another model than `TERCET_POOL` says.
    """
    if state.model not in {"", slot.model}:
        raise BranchError(
            MISCONFIGURED, f"The worker serves {state.model}, not {slot.model}: correct the entry of TERCET_POOL."
        )


def _pause_s(code: str, num_failures: int) -> float:
    """Until a worker on another machine is tried again."""
    if code in {MISCONFIGURED, "refused", "untrusted"}:
        return MISCONFIGURED_RECONNECT_S
    return min(MAX_RECONNECT_S, RECONNECT_S * 2.0 ** min(num_failures, 10))
