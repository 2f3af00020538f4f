"""Runs jobs: leases them while the pool has room, keeps the leases, and stores the first result of each.

One thread leases, renews and purges; each job is computed on a thread of a small pool. A job that the pool refuses
returns to the queue. How a job is computed is the caller's function; no dialect and no store is known here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import structlog

from gateway.jobs.queue import Final, JobQueue
from gateway.jobs.store import Job
from shared.call_threads import CallThreads
from shared.cancellation import Cancellation, Cancelling
from shared.errors import JobsUnavailable, NotReady, Overloaded, ShuttingDown, TercetError, internal_error

# How often leases are renewed and the store is asked for jobs of other processes; a job of this process wakes the
# executor at once. A third of a lease.
POLL_S = 2.0
# How often an idle executor looks whether the pool has room again.
ROOM_POLL_S = 0.25
PURGE_S = 30.0
# How long a job that the pool refused waits, and this executor with it.
REFUSED_DELAY_S = 1.0
# How long an outcome is kept while the store is unavailable.
MAX_STORING_S = 60.0
REFUSALS = (NotReady, Overloaded, ShuttingDown)

Compute: TypeAlias = Callable[[Job, Cancelling], bytes]
log = structlog.get_logger()


class _RunningJob(Cancellation):
    """A leased job and the cancellation of its computation."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


class JobExecutor:
    """Runs the jobs of a queue on threads of this process.

    Attributes:
        queue: thread-safe, for the clients of the jobs.
        num_open: jobs queued or running in the store, as of the last poll.
    """

    def __init__(
        self,
        queue: JobQueue,
        *,
        num_threads: int,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            num_threads: jobs that run at the same time.
            has_room: whether a job may start now.
        """
        self.num_open = 0
        self.queue = queue
        self._num_threads = num_threads
        self._has_room = has_room
        self._changed = threading.Condition()
        self._is_woken = False
        self._is_stopping = False
        self._paused_until = 0.0
        self._running: dict[str, _RunningJob] = {}
        self._threads = CallThreads("job", num_threads)
        self._thread: threading.Thread | None = None
        self._is_store_failing = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, compute: Compute, is_revoked: Callable[[str], bool] | None = None) -> None:
        """
        Args:
            compute: a job's result, JSON. It raises `TercetError`: `REFUSALS` put the job back, others are its outcome.
            is_revoked: whether the API key with this id was revoked: its jobs are cancelled. None: there are no keys.
        """
        self._compute = compute
        self._is_revoked = is_revoked
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is a new job."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def cancel(self, job_id: str) -> None:
        """End the computation of a job that was cancelled, if it runs here. Elsewhere the next renewal ends it."""
        with self._changed:
            running = self._running.get(job_id)
        if running is not None:
            running.cancel()

    def stop(self) -> None:
        """Lease no more, end all computations, and return their jobs to the queue. Does not wait for that."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of a stop."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    # In the thread that leases.

    def _run(self) -> None:
        polled_at = purged_at = float("-inf")
        while not self._is_stopping:
            now = time.monotonic()
            num_cleared = self.queue.num_cleared
            try:
                if now - polled_at >= POLL_S:
                    polled_at = now
                    self._renew()
                    self.num_open = self.queue.num_open()
                    self._note_store(None)
                if now - purged_at >= PURGE_S:
                    before = self.queue.num_cleared
                    self.queue.purge()
                    if self.queue.num_cleared == before:
                        purged_at = now
                self._lease()
                if self.queue.num_cleared != num_cleared:
                    continue  # there may be more; leases are renewed in between
            except JobsUnavailable as error:
                self._paused_until = time.monotonic() + POLL_S
                self._note_store(error)
            except Exception as error:
                self._paused_until = time.monotonic() + POLL_S
                log.error("unhandled_exception", exc_info=error)
            self._wait()
        for running in self._running_jobs():
            running.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self.queue.close()

    def _wait(self) -> None:
        """Until there may be work."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopping or (self._is_woken and self._may_lease),
                timeout=POLL_S if self._may_lease else ROOM_POLL_S,
            )
            self._is_woken = self._is_woken and not self._may_lease

    def _renew(self) -> None:
        for running in self._running_jobs():
            if not self.queue.renew(running.job):
                running.cancel()

    def _lease(self) -> None:
        """Start jobs while there is room for them."""
        while not self._is_stopping and self._may_lease:
            if len(self._running) >= self._num_threads or (job := self.queue.lease(self._is_revoked)) is None:
                return
            running = _RunningJob(job)
            with self._changed:
                self._running[job.id] = running
            log.info("job_started", **_described(job))
            try:
                self._threads.submit(self._run_job, running)
            except Overloaded as refusal:
                self._run_job(running, refusal)  # which puts it back

    @property
    def _may_lease(self) -> bool:
        return time.monotonic() >= self._paused_until and self._has_room()

    def _running_jobs(self) -> list[_RunningJob]:
        with self._changed:
            return list(self._running.values())

    def _note_store(self, error: JobsUnavailable | None) -> None:
        """Log the beginning and the end of an outage."""
        if error is not None and not self._is_store_failing:
            log.warning("job_store_failed", detail=error.detail, reason=type(error.__cause__ or error).__name__)
        elif error is None and self._is_store_failing:
            log.info("job_store_recovered")
        self._is_store_failing = error is not None

    # In a thread of the pool.

    def _run_job(self, running: _RunningJob, refusal: Overloaded | None = None) -> None:
        job = running.job
        try:
            self._store_outcome(running, refusal)
        except Exception as error:
            log.error("unhandled_exception", **_described(job), exc_info=error)
        finally:
            with self._changed:
                if self._running.get(job.id) is running:
                    del self._running[job.id]
                self._is_woken = True
                self._changed.notify_all()

    def _store_outcome(self, running: _RunningJob, refusal: Overloaded | None) -> None:
        job, started_at = running.job, time.monotonic()
        state: Final = "failed"
        result = error = b""
        try:
            if refusal is not None:
                raise refusal
            result = self._compute(job, running.on_cancel)
            state = "succeeded"
        except REFUSALS as refused:
            if not running.is_cancelled:
                self._paused_until = time.monotonic() + REFUSED_DELAY_S
                self._persist(lambda: self.queue.put_back(job, REFUSED_DELAY_S))
                log.info("job_put_back", **_described(job), code=refused.code)
                return
        except TercetError as failure:
            error = failure.problem()
        except BaseException as failure:  # of any class: the job is not to be computed again
            log.error("unhandled_exception", **_described(job), exc_info=failure)
            error = internal_error(job.id).problem()
        if running.is_cancelled:
            # If its client or a lost lease ended it, the store knows. If `stop` did, another executor takes it.
            if self._is_stopping and self._persist(lambda: self.queue.put_back(job, 0.0)):
                log.info("job_put_back", **_described(job), code=ShuttingDown.code)
            return
        is_stored = self._persist(lambda: self.queue.finish(job, state, result=result, error=error))
        log.info(
            "job_finished" if is_stored else "job_discarded",
            **_described(job),
            state=state,
            ms=round(1e3 * (time.monotonic() - started_at), 2),
        )

    def _persist(self, write: Callable[[], bool]) -> bool:
        """Write to the store, again while it is unavailable. Another executor may get the job meanwhile: then false."""
        until = time.monotonic() + MAX_STORING_S
        while True:
            try:
                return write()
            except JobsUnavailable:
                if self._is_stopping or time.monotonic() >= until:
                    return False
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping, timeout=0.5)


def _described(job: Job) -> dict[str, object]:
    """Describe a job in the log. Without API keys, the whole id is enough to read the result."""
    key = {"key": job.owner} if job.owner else {}
    return {"job": job.id[:8], "attempt": job.attempts, **key}
