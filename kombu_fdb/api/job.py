"""A job: a message in the hands of its taker, and what can be done with it, each once.

Model. A job is *held* until its consumer settles it, once (acked, released, buried), or until its lease is *lost*. A
lease is lost if this process was silent for longer than ``session_ttl``, if the time to run has passed, or if the
message was deleted. A job without references can't be settled, so it is *dropped*: it returns to its place, and the
attempt counts, as its taker had begun with it. Only the holder can settle: a lost lease changes nothing any more
(ONE-OWNER).

What each error can say, and what it can't. The handle remembers its own settlement: settling twice raises
:exc:`~kombu_fdb.errors.AlreadySettled`. In the store there is a lease, or there is not: without it, ``ack``,
``release``, ``bury`` and ``extend`` raise :exc:`~kombu_fdb.errors.LeaseLost`. The lease does not record whether another
process has the job by now, or whether the job is gone; :meth:`kombu_fdb.api.queue.Queue.find` finds out, and reads the
queue for that.

``with job:`` settles it at the end of the block, unless the block has: acked after success, released with the error in
its history after an exception. If the store does not answer then, another thread repeats the release, and the exception
of the block is the one that is raised.

A name spells its backoff schedule: pauses separated by slashes and their unit (``s``, ``min`` or ``h``).
``"1/5/25min"`` waits 1 minute after the first attempt, 5 after the second, 25 after every later one. That one is also
called ``"processing-queue"``, after the recipe it comes from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kombu_fdb.api.connection import Connection
from kombu_fdb.errors import AlreadySettled, CommitUnknown, InvalidArgument, KombuFDBError, LeaseLost
from kombu_fdb.model import Death, Delivery, Lease
from kombu_fdb.primitives import failure
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.ranges import milliseconds

# -- backoff -----------------------------------------------------------------------------------------------------------


FIX = "Write pauses and a unit (1/5/25min, 10/30s, 1h), or processing-queue."
_NAMED = {"processing-queue": "1/5/25min"}
_UNITS = {"s": 1, "min": 60, "h": 3600}
_NAME = re.compile(r"(?P<pauses>\d+(\.\d+)?(/\d+(\.\d+)?)*)(?P<unit>s|min|h)", re.ASCII)


def backoff_s(name: str, attempt: int) -> float:
    """The pause after the ``attempt``-th attempt (from 1), in seconds. Raises ``InvalidArgument``."""
    match = _NAME.fullmatch(_NAMED.get(str(name), str(name)))
    if match is None:
        near = difflib.get_close_matches(str(name), _NAMED, n=1)
        raise InvalidArgument("not a backoff schedule", name=name, fix=f"Did you mean {near[0]}?" if near else FIX)
    if attempt < 1:
        raise InvalidArgument("attempts count from 1", attempt=attempt)
    pauses = match["pauses"].split("/")
    return float(pauses[min(attempt, len(pauses)) - 1]) * _UNITS[match["unit"]]


# -- the job -----------------------------------------------------------------------------------------------------------


class Job:
    """Get it from ``take``. Settle it once; any thread may. It is held for as long as there is a reference to it."""

    #: Whether it was settled or lost, so that there is nothing to release; or is not made yet: then its maker has the
    #: lease.
    _ended = True

    def __init__(self, connection: Connection, delivery: Delivery) -> None:
        self._connection = connection
        self._delivery = delivery
        self._settled: str | None = None
        self._in_doubt = False
        self._ended = False

    def __repr__(self) -> str:
        state = self._settled or "held"
        return f"<Job {self.id.hex()} of {self.queue}: attempt {self.attempts}, {state}>"

    def __del__(self) -> None:
        """Runs in any thread at any moment: takes no lock and never waits."""
        if self._ended:
            return
        try:
            self._connection.dropped(self._delivery.lease)
        except BaseException:  # out of a signal handler: Python discards it, and nothing else would release the job
            self._connection.dropped(self._delivery.lease)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """See the module. After success raises what :meth:`ack` raises; after an exception, nothing of its own."""
        if self._ended:
            return
        if error is None:
            self.ack()
            return
        try:
            self.release(error=error)
        except KombuFDBError:  # lost by now, or the store does not answer: the duties thread repeats it
            self._connection.dropped(self._delivery.lease)

    @property
    def lease(self) -> Lease:
        """The lease under which it is held."""
        return self._delivery.lease

    @property
    def id(self) -> bytes:
        """16 bytes, as ``put`` returned them; the same in every attempt."""
        return self._delivery.message_id

    @property
    def queue(self) -> str:
        return self._delivery.queue

    @property
    def payload(self) -> bytes:
        return self._delivery.payload

    @property
    def key(self) -> str:
        """Whose job it is, for fair scheduling; "" for none."""
        return self._delivery.key

    @property
    def attempts(self) -> int:
        """Which attempt this is, from 1. Being released unstarted does not count."""
        return self._delivery.redeliveries + 1

    @property
    def deaths(self) -> tuple[Death, ...]:
        """Its history as a dead letter, the newest first; ``bury(error=...)`` stands in ``details["error"]``.

        Of an exception also its ``error_class``.
        """
        return self._delivery.deaths

    @property
    def ttr(self) -> float | None:
        """Seconds it may take; None for any time."""
        return self._delivery.ttr_ms / 1000 or None

    def ack(self) -> None:
        """Done: delete it. Raises ``LeaseLost``, ``AlreadySettled``, or a ``StoreError``: try again."""
        self._settle("acked", self._connection.engine.messages.ack)

    def release(self, delay: float = 0, *, backoff: str | None = None, error: object = None) -> None:
        """Release it: to its old position, or not before ``delay`` seconds have passed. The attempt counts.

        ``backoff``: the name of a schedule instead, such as ``"1/5/25min"`` (:mod:`kombu_fdb.api.job`). Past the
        queue's ``x-delivery-limit`` it is dead-lettered, with ``error`` in its history. Raises what :meth:`ack` raises.
        """
        if backoff is not None:
            if delay:
                raise InvalidArgument(
                    "a delay and a backoff schedule", delay=delay, backoff=backoff, fix="Pass only one of them."
                )
            delay = backoff_s(backoff, self.attempts)
        due_ms = due_at(delay)
        self._settle(
            "released",
            lambda leases: self._connection.engine.messages.release(leases, due_ms=due_ms, details=_details(error)),
        )

    def bury(self, *, error: object = None) -> None:
        """Make it a dead letter, with ``error`` in its history. Raises what :meth:`ack` raises.

        ``queue.dead_letters.replay()`` replays it.
        """
        self._settle("buried", lambda leases: self._connection.engine.messages.reject(leases, **_details(error)))

    def extend(self) -> None:
        """Check that it is still held, and restart its time to run.

        There is nothing else to extend, as leases belong to sessions: a job is held for as long as its process lives.
        Raises ``LeaseLost``: stop working on it. Raises ``AlreadySettled``.
        """
        self._check_unsettled()
        if not self._connection.engine.messages.holds([self._delivery.lease])[0]:
            raise self._lost()
        self._connection.watch(self._delivery)

    def _settle(self, how: str, verb: Callable[[list[Lease]], list[bool]]) -> None:
        self._check_unsettled()
        try:
            held = verb([self._delivery.lease])[0]
        except CommitUnknown:
            self._in_doubt = True
            raise
        self._connection.settled(self._delivery.lease)
        self._ended = True  # only now: interrupted before, it is dropped, and so its lease is not kept
        if not held:
            self._check_unsettled()  # another thread was faster
            raise self._lost()
        self._settled = how

    def _check_unsettled(self) -> None:
        if self._settled is not None:
            raise AlreadySettled(id=self.id.hex(), queue=self.queue, how=self._settled)

    def _lost(self) -> LeaseLost:
        hint = "or it was settled by an earlier call whose answer was lost" if self._in_doubt else None
        return LeaseLost(id=self.id.hex(), queue=self.queue, hint=hint)


def due_at(delay: float) -> int:
    """The wall clock in ``delay`` seconds, in milliseconds and rounded up; 0 for no delay.

    Raises ``InvalidArgument``.
    """
    # The clock shows a moment that began up to a millisecond ago.
    return Clock().wall_ms() + 1 + milliseconds("delay", delay) if delay else 0


def _details(error: object) -> dict[str, str]:
    return {} if error is None else failure.details_of(error)
