"""The session of this process, with the two threads that keep it.

Model. A membership is *open* from :meth:`Membership.open` until :meth:`Membership.close`, or until somebody fenced it;
then it is *lost*, and stays so: the owner opens another one. All states are one way.

* The heartbeat thread beats, and does nothing else, so that neither a long sweep, nor a task on Celery's event loop,
  nor a consumer that works for an hour makes a live process look dead.
* The duties thread sweeps, promotes, expires (``process/keeper.py``), and does the client's housekeeping.

A claim is *under way* from before its transaction begins until its messages are recorded as known. One that ends in
between (the answer was lost, the commit may still land, an exception came out of a signal handler at any line) is
*suspect*: the duties thread, or the next claim, makes sure that it holds nothing and never will (``Engine.recover``).
Nothing here takes a lock, so no exception can leave one behind; single operations of dictionaries and sets are atomic.

Both threads outlive every store error: they say so once, try again, and say once that it is over. Neither keeps the
process alive.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.stored.session import LEASES_PER_CLAIM
from kombu_fdb.errors import CommitUnknown, KombuFDBError, SessionLost
from kombu_fdb.model import ClaimTerms, Delivery, Lease
from kombu_fdb.primitives.clock import Clock, SystemClock
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process.keeper import Duties, Heartbeat
from kombu_fdb.settings.options import Options
from kombu_fdb.store.protocol import Watch

__all__ = ["BEATS", "Membership"]

logger = logging.getLogger(__name__)

#: Beats per TTL. An observer needs only one in a TTL; the others are for the unlucky.
BEATS = 6
#: Queues shown by a heartbeat at most.
MOST_CONSUMED = 100
#: Longest pause after an error, in seconds.
RETRY_S = 1.0
#: A claim lasts no longer than its deadline; after so many of those it is not under way any more.
CLAIM_TIMEOUTS = 3
#: Shortest pause between two looks, however often the alarm rings, in seconds.
ALARM_S = 0.005


class Trouble:
    """Logs the first failure of a series and its end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failing = False

    def begins(self, error: Exception) -> None:
        if not self._failing:
            unexpected = not isinstance(error, KombuFDBError)
            logger.warning("%s fails, will be repeated: %s", self._what, error, exc_info=unexpected)
        self._failing = True

    def ends(self) -> None:
        if self._failing:
            logger.warning("%s works again", self._what)
        self._failing = False


class Membership:
    """One session. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        options: Options,
        session_id: bytes,
        chores: Callable[[], None],
        *,
        clock: Clock | None = None,
        bell: Bell | None = None,
    ) -> None:
        """Use :meth:`open`; this starts no thread."""
        self.pid = os.getpid()
        self.session_id = session_id
        self.lost = False
        #: Leases that this process has and knows of.
        self.known: set[Lease] = set()
        #: What each consumer of this process consumes, for those who look at the sessions.
        self.consumed: dict[object, Collection[str]] = {}
        self._engine = engine
        self._options = options
        self._chores = chores
        #: By the first number of its leases, since when each claim is under way.
        self._claims: dict[int, float] = {}
        #: Claims that have ended without anybody knowing how.
        self._suspects: set[int] = set()
        self._stopped = threading.Event()
        self._clock = clock or SystemClock()
        self._bell = bell or Bell()
        self._threads = [
            threading.Thread(target=target, name=f"kombu-fdb-{name}", daemon=True)
            for name, target in (("heartbeat", self._beat), ("duties", self._serve))
        ]

    @classmethod
    def open(cls, engine: Engine, options: Options, chores: Callable[[], None]) -> Membership:
        """``chores`` is called from the duties thread, about once a second and after :meth:`nudge`."""
        session_id = engine.open_session(_describe(), ttl_s=options.session_ttl)
        membership = cls(engine, options, session_id, chores)
        for thread in membership._threads:
            thread.start()
        return membership

    def close(self) -> None:
        """Stop the threads, and hand back whatever is still held. Raises a ``StoreError``."""
        self.stop()
        if self.lost:
            return
        held = self._engine.close_session(self.session_id)
        if held:
            logger.info("Restoring %d unacknowledged message(s)", held)

    def stop(self) -> None:
        """Have the threads end, and wait for them. The session stands until it is closed, or taken for dead."""
        self._tell_threads()
        began = self._clock.monotonic()
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            left_s = began + self._options.operation_timeout - self._clock.monotonic()
            thread.join(timeout=self._engine.patience.allow(max(left_s, 0.0)))
        if any(thread.is_alive() for thread in others):
            self._engine.patience.wasted(self._clock.monotonic() - began)

    def _tell_threads(self) -> None:
        self._stopped.set()
        self._bell.ring()

    # -- claiming --------------------------------------------------------------------------------------------------

    def claim(
        self,
        queues: Sequence[str],
        limit: int,
        *,
        no_ack: Collection[str] = (),
        acks: Sequence[Lease] = (),
        consumers: Mapping[str, str] | None = None,
        hand: list[Delivery] | None = None,
    ) -> list[Delivery]:
        """:meth:`~kombu_fdb.engine.facade.engine.Engine.claim` for this session. ``acks`` must be its own.

        Hands back first what an earlier claim may have leased unknown to anybody. Takes no lock: each call ends by its
        own deadline, however many threads claim.

        ``hand``: an empty list for what is found. Who brings it knows what he has to hand back, also when an exception
        out of a signal handler strikes between the end of this call and the next line of his.
        """
        hand = [] if hand is None else hand
        self.recover()
        first = self._engine.reserve()
        self._claims[first] = self._clock.monotonic()
        try:
            found = self._engine.claim(
                self.session_id,
                queues,
                limit,
                terms=ClaimTerms(no_ack=no_ack, acks=acks, consumers=consumers or {}, first=first),
            )
            self.known.update([each.lease for each in found if each.queue not in no_ack])
            hand.extend(found)
            if self._claims.pop(first, None) is None:  # it took so long that it was given up
                self._suspect(first)
                hand.clear()
            return hand
        except SessionLost:
            self._claims.pop(first, None)
            self.lose()
            raise
        except BaseException as error:  # of the caller's too: a signal handler's, gevent's timeout
            if not isinstance(error, KombuFDBError) or isinstance(error, CommitUnknown):
                self._suspect(first)
                hand.clear()
            self._claims.pop(first, None)
            raise

    def _suspect(self, first: int) -> None:
        """A claim has leased what nobody knows of, or may still."""
        self._suspects.add(first)
        self.nudge()

    def recover(self) -> None:
        """Hand back what claims of unknown outcome have leased.

        Raises ``SessionLost``, or a ``StoreError``: it is tried again.
        """
        for first in list(self._suspects):
            try:
                self._engine.recover(self.session_id, first)
            except SessionLost:
                self.lose()
                raise
            self._suspects.discard(first)
            block = range(first, first + LEASES_PER_CLAIM)
            self.known.difference_update([lease for lease in list(self.known) if lease.number in block])

    def watch_claims(self) -> None:
        """Recover, also claims that are longer under way than they can last: ended by two exceptions at once.

        For the duties thread. Raises as :meth:`recover`.
        """
        longest_s = CLAIM_TIMEOUTS * self._options.operation_timeout
        for first, began_s in list(self._claims.items()):
            if self._clock.monotonic() - began_s > longest_s and self._claims.pop(first, None) is not None:
                self._suspects.add(first)
        self.recover()

    def lose(self) -> None:
        """The session was fenced."""
        if self.lost:
            return
        self.lost = True
        self._tell_threads()
        logger.warning(
            "this process was silent for longer than session_ttl (%g s) and taken for dead: what it held (%s) was "
            "given back, and what it has already started may run twice",
            self._options.session_ttl,
            plural(len(self.known), "message"),
        )

    # -- the threads -----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        heartbeat = Heartbeat(self._engine, self.session_id, self._options.session_ttl, self._consumed)
        trouble = Trouble("the heartbeat to the store")
        interval_s = self._options.session_ttl / BEATS
        while not self._stopped.wait(interval_s):
            try:
                if not heartbeat.run_once():
                    self.lose()
                    break
                trouble.ends()
            except Exception as error:  # noqa: BLE001 - a thread that dies is a worker that looks dead
                trouble.begins(error)

    def _consumed(self) -> list[str]:
        return sorted({queue for queues in list(self.consumed.values()) for queue in queues})[:MOST_CONSUMED]

    def _serve(self) -> None:
        duties = self._duties()
        trouble = Trouble("the maintenance of the queues")
        alarm: Watch | None = None
        pause_s = 0.0
        while not self._stopped.is_set():
            rang = self._bell.wait(pause_s)
            self._bell.clear()
            try:
                if alarm is None or rang:
                    alarm = self._set_alarm(alarm)  # before the look: what is delayed after it rings
                self.watch_claims()
                pause_s = max(duties.run_once(), ALARM_S)
                self._chores()
                trouble.ends()
            except Exception as error:  # noqa: BLE001
                if not self.lost:
                    trouble.begins(error)
                pause_s = RETRY_S
        self._leave(duties, alarm)
        self._bell.close()

    def _duties(self) -> Duties:
        return Duties(
            self._engine,
            SystemClock(),
            random.Random(),
            self.session_id,
            sweep_interval_s=self._options.sweep_interval,
        )

    def _set_alarm(self, old: Watch | None) -> Watch:
        if old is not None:
            old.cancel()
        alarm = self._engine.watch_alarm()
        alarm.on_fire(self._bell.ring)
        return alarm

    def _leave(self, duties: Duties, alarm: Watch | None) -> None:
        if alarm is not None:
            alarm.cancel()
        if self.lost:
            return
        try:
            duties.stop()
        except KombuFDBError as error:
            logger.debug("could not leave the role: %s", error)

    def nudge(self) -> None:
        """Run the chores soon. Never blocks."""
        self._bell.ring()


def _describe() -> dict[str, str | int]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "program": Path(sys.argv[0] or "python").name}
