"""What the two threads that keep a session do, as steps without the threads.

Model. In a *beat* the session says that it lives; when it is told that it was fenced, the membership is lost. In a
*turn* of the duties an alarm is set, so that what is delayed from then on rings; claims of which it does not know the
outcome of are recovered; the duties have one round (``duty_cycle.py``); and the client's deferred calls are made. A
step that fails has changed nothing that the next one depends on, so their driver repeats it after a pause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.process.membership import Membership
from kombu_fdb.process.upkeep.duty_cycle import Duties, Heartbeat
from kombu_fdb.store.protocol import Watch

logger = logging.getLogger(__name__)


class Turns:
    """Of one session. :meth:`beat` is one thread's, :meth:`serve` and :meth:`leave` are another's."""

    def __init__(
        self, engine: Engine, membership: Membership, duties: Duties, deferred: Callable[[], None], *, ttl_s: float
    ) -> None:
        self._engine = engine
        self._membership = membership
        self._duties = duties
        self._run_deferred = deferred
        self._heartbeat = Heartbeat(engine, membership.session_id, ttl_s, lambda: membership.queues)
        self._alarm: Watch | None = None

    @property
    def lost(self) -> bool:
        """Whether the session was fenced, as far as is known."""
        return self._membership.lost

    def beat(self) -> bool:
        """False if the session was fenced."""
        if not self._heartbeat.run_once():
            self._membership.lose()
        return not self.lost

    def serve(self, *, rang: bool) -> float:
        """Returns in how many seconds to call again, at the latest. Raises a ``StoreError``, or ``SessionLost``."""
        if self._alarm is None or rang:
            self._set_alarm()  # before the look: what is delayed after it rings
        self._membership.watch_claims()
        try:
            return self._duties.run_once()
        finally:  # a duty that a full disk refuses is refused in each round
            self._run_deferred()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._engine.sessions.watch_alarm()
        self._alarm.on_fire(self._membership.threads.ring)

    def leave(self) -> None:
        """There are no more turns."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self.lost:
            return
        try:
            self._duties.stop()
        except KombuFDBError as error:
            logger.debug("could not leave the role: %s", error)
