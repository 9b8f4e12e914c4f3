"""What may be done to a message, and by whom: a message's life as a table, held against each change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kit.simulation.ledgers.rows import Row
from kit.simulation.process import Frame
from kit.simulation.violation import Violation
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.model import Lease, SessionId

#: Verbs of operators who delete messages, and of those who take them elsewhere.
REMOVERS = frozenset({"purge", "delete", "drop", "cancel", "discard"})
MOVERS = frozenset({"replay", "walk", "move"})
#: Verbs that lease messages.
CLAIMS = frozenset({"claim", "serve"})
#: From, to: the verbs that may. ``new``: it was nowhere before; ``gone``: it is nowhere any more; ``moved``: it is in
#: another queue, as a dead letter or back from being one.
RIGHTS: Mapping[tuple[str, str], frozenset[str]] = {
    ("new", "ready"): frozenset({"publish", "repeat", "garble"}),
    ("new", "delayed"): frozenset({"publish", "repeat"}),
    ("new", "moved"): frozenset({"publish", "repeat", "reject", "release", "duties", "close"}) | CLAIMS,
    ("ready", "leased"): CLAIMS,
    ("ready", "gone"): frozenset({"publish", "repeat", "duties"}) | REMOVERS | MOVERS | CLAIMS,
    ("ready", "moved"): frozenset({"publish", "repeat", "duties"}) | MOVERS | CLAIMS,
    ("ready", "ready"): frozenset({"reschedule"}),
    ("ready", "delayed"): frozenset({"reschedule"}),
    ("delayed", "delayed"): frozenset({"reschedule"}),
    ("delayed", "ready"): frozenset({"duties", "promote", "reschedule"}),
    ("delayed", "gone"): frozenset({"duties"}) | REMOVERS,
    ("delayed", "moved"): frozenset({"move"}),
    ("leased", "gone"): frozenset({"ack", "claim", "delete", "reject", "release", "duties"}),
    ("leased", "ready"): frozenset({"release", "recover", "duties", "close", "sweep"}),
    ("leased", "delayed"): frozenset({"release"}),
    ("leased", "moved"): frozenset({"reject", "release", "duties"}),
}
#: Verbs of the owner of a lease, and verbs that bring back what a session held that has ended.
OWNERS = frozenset({"ack", "claim", "release", "reject", "recover"})
SWEEPERS = frozenset({"duties", "close", "sweep"})
#: Verbs that count a lease among those of the key "", with a queue's first limit. Nothing else of it changes.
COUNTERS = frozenset({"limit", "pause", "duties", "promote"})
#: Why a message may become a dead letter in a verb.
REASONS = {
    "claim": ("expired", "malformed"),
    "serve": ("expired", "malformed"),
    "publish": ("maxlen",),
    "repeat": ("maxlen",),
    "reject": ("rejected",),
    "release": ("delivery_limit",),
    "duties": ("delivery_limit", "maxlen", "expired"),
}
#: Arguments of queues that the duties delete, or trim.
TRIMMED = frozenset({"x-expires", "x-max-length", "x-max-length-bytes"})


class Once(NamedTuple):
    """Of those with this id to this queue one is stored within the window."""

    queue: str
    dedup_id: str
    window_ms: int


class Judge:
    """Knows the queues and what was published. ``graves``: where a dead-letter exchange leads."""

    def __init__(self, queues: Mapping[str, Mapping[str, Any]], delivery_limit: int, graves: Sequence[str]) -> None:
        self._queues = queues
        self._delivery_limit = delivery_limit
        self._graves = graves
        #: Label -> due_ms of what was ever to be published.
        self.due: dict[str, int] = {}
        #: Label -> its time to live in ms; and when that is over by its publisher's clock, at the earliest and latest.
        self.lives: dict[str, int] = {}
        self._ends: dict[str, tuple[int, int]] = {}
        self.arrived: set[str] = set()
        #: Those whose publish was refused: they must never appear.
        self.refused: set[str] = set()
        #: Label -> what is to be published once, and until when nothing like it is, by its publisher's clock: at least,
        #: and at most.
        self.once: dict[str, Once] = {}
        self._windows: dict[tuple[str, str], tuple[int, int]] = {}
        self._handed_out: set[bytes] = set()
        #: The ids of messages whose queue was deleted: one that a session held goes when it would come back.
        self.doomed: set[bytes] = set()

    def moved(
        self,
        author: Frame | None,
        name: str,
        before: Row | None,
        after: Row | None,
        appeared: Sequence[Row],
        sessions: set[SessionId],
    ) -> None:
        """One message in one commit. ``appeared``: all rows this commit has written. Raises ``Violation``."""
        assert author is not None
        if author.verb in COUNTERS and before is not None and not before.keyed and after == before._replace(keyed=True):
            return
        step = _step(before, after)
        if author.verb not in RIGHTS.get(step, ()):
            what = f"{name} went from {before or 'nowhere'} to {after or 'nowhere'}"
            raise Violation("ONE-PLACE" if after else "DURABLE", f"{what} in {author.verb}")
        if before is None and after is not None and step[1] != "moved":
            self._published(author, name, after)
        if before is not None and before.state == "leased":
            self._settled(author, name, before, after, sessions)
        if step == ("delayed", "ready") and author.verb != "reschedule":  # a person may
            self._not_early(author, name, before.due_ms if before else 0)
        if before is not None and step[1] == "moved" and author.verb not in MOVERS:
            self._buried(author, name, before, after, appeared)
        if before is not None and after is None:
            self._ended(author, name, before, appeared)
        if before is not None and before.state == "ready" and not before.record.deaths:
            self._lived(author, name, before, after)
        if after is not None and after.record.redeliveries > self._limit(after.queue):
            raise Violation("POISON-ENDS", f"{name} was delivered {after.record.redeliveries} times")

    def _published(self, author: Frame, name: str, after: Row) -> None:
        if author.verb == "garble":
            return
        if name in self.once:
            self._once(author, name, self.once[name])
        elif name in self.arrived or name in self.refused:
            how = "stored twice" if name in self.arrived else "stored although its publish had failed"
            raise Violation("ONE-PLACE", f"{name} was {how}")
        self.arrived.add(name)
        if name in self.lives:
            moments = author.earliest_ms, author.latest_ms
            earliest_ms, latest_ms = (max(moment, self.due[name]) + self.lives[name] for moment in moments)
            self._ends[name] = earliest_ms, latest_ms
        if after.state == "ready":
            self._not_early(author, name, self.due[name])

    def handed_out(self, message_id: bytes, name: str) -> None:
        """Without a lease. Raises ``Violation`` at the second time."""
        if message_id in self._handed_out:
            raise Violation("ONE-OWNER", f"{name} was taken twice without a lease")
        self._handed_out.add(message_id)

    def window(self, once: Once) -> tuple[int, int] | None:
        """Until when nothing like it is stored: at least, and at most."""
        return self._windows.get(once[:2])

    def was_stored(self, once: Once) -> bool:
        """It, or another of which it would be a duplicate."""
        return once[:2] in self._windows

    def _once(self, author: Frame, name: str, once: Once) -> None:
        if author.latest_ms < self._windows.get(once[:2], (0, 0))[0]:
            raise Violation("ONCE-PUBLISHED", f"{name} was stored within the window of {once.dedup_id}")
        self._windows[once[:2]] = author.began_ms + once.window_ms, author.latest_ms + once.window_ms

    @staticmethod
    def _not_early(author: Frame, name: str, due_ms: int) -> None:
        if due_ms > author.latest_ms:
            raise Violation("NOT-EARLY", f"{name} is ready {due_ms - author.latest_ms} ms before it is due")

    @staticmethod
    def _settled(author: Frame, name: str, before: Row, after: Row | None, sessions: set[SessionId]) -> None:
        own = author.process is not None and before.session in author.process.sessions
        if author.verb in OWNERS and not own:
            raise Violation("ONE-OWNER", f"{name}, {before}, was settled by another")
        if after is not None and author.verb == "close" and Lease(before.session, before.number) in author.settled:
            raise Violation("NOT-TWICE", f"{name}, {before}, was settled, and came back when its process closed")
        rejected = author.process is not None and Lease(before.session, before.number) in author.process.rejected
        if rejected and after is not None and after.queue == before.queue and author.verb == "release":
            raise Violation("NOT-TWICE", f"{name}, {before}, was rejected, and came back")
        if author.verb in SWEEPERS and before.session in sessions:
            raise Violation("NOT-TWICE", f"{name}, {before}, was taken from a session that lives")
        if after is not None and after.queue == before.queue:
            counted = author.verb in ("duties", "sweep") or (author.verb == "release" and author.counted)
            if after.record.redeliveries != before.record.redeliveries + counted:
                raise Violation("POISON-ENDS", f"{name} came back by {author.verb} and was not counted right")

    def _buried(self, author: Frame, name: str, before: Row, after: Row | None, appeared: Sequence[Row]) -> None:
        assert after is not None
        if after.reason not in REASONS.get(author.verb, ()):
            raise Violation("POISON-ENDS", f"{name} died of {after.reason!r} in {author.verb}")
        if after.reason == "delivery_limit" and before.record.redeliveries < self._limit(before.queue):
            raise Violation("POISON-ENDS", f"{name} died after {before.record.redeliveries} deliveries")
        if after.reason == "expired" and not 0 < before.record.expires_ms <= author.latest_ms:
            raise Violation("POISON-ENDS", f"{name} died of its age before its time")
        wanted = self._targets(before.queue)
        found = [row.queue for row in appeared if row.likeness == after.likeness and row.reason == after.reason]
        if not wanted <= set(found):
            raise Violation("DURABLE", f"{name} reached {found} of {sorted(wanted)}")

    def _ended(self, author: Frame, name: str, before: Row, appeared: Sequence[Row]) -> None:
        """It is nowhere any more."""
        verb, queue = author.verb, before.queue
        if before.malformed and verb in CLAIMS:
            kept = any(row.record.payload == before.malformed and row.reason == "malformed" for row in appeared)
            if not kept and not queue.endswith(DEAD_SUFFIX):
                raise Violation("POISON-ENDS", f"malformed bytes of {queue} are lost")
            return
        expired = 0 < before.record.expires_ms <= author.latest_ms
        held = before.state == "leased"
        doomed = held and before.record.message_id in self.doomed
        trimmed = not TRIMMED.isdisjoint(self._queues.get(queue, {}))
        may = {
            "claim": expired or held or author.no_ack,
            "serve": expired,
            "publish": trimmed,
            "repeat": trimmed,
            "duties": queue.endswith(DEAD_SUFFIX) or trimmed or expired or doomed,
            "replay": expired,
            "walk": expired,
            "move": False,
            "release": queue.endswith(DEAD_SUFFIX) or doomed,
            "reject": queue.endswith(DEAD_SUFFIX),
        }
        if not may.get(verb, True):
            raise Violation("DURABLE", f"{name}, {before}, was lost in {verb}")

    def _lived(self, author: Frame, name: str, before: Row, after: Row | None) -> None:
        """A time to live is over by the clock of the process that looks, and began by that of its publisher."""
        earliest_ms, latest_ms = self._ends.get(name, (0, 2**63))
        if after is not None:
            expired = after.reason == "expired"
        else:
            expired = before.record.expires_ms > 0 and TRIMMED.isdisjoint(self._queues.get(before.queue, {}))
        if (
            author.verb in ("claim", "serve", "duties")
            and not author.no_ack
            and expired
            and author.latest_ms < earliest_ms
        ):
            raise Violation("SKEW", f"{name} ended {earliest_ms - author.latest_ms} ms before its time to live")
        if after is not None and after.state == "leased" and latest_ms <= author.earliest_ms:
            raise Violation("SKEW", f"{name} was delivered {author.earliest_ms - latest_ms} ms after its time to live")

    def _targets(self, queue: str) -> set[str]:
        if "x-dead-letter-exchange" in self._queues.get(queue, {}):
            return set(self._graves)
        return {queue + DEAD_SUFFIX}

    def _limit(self, queue: str) -> int:
        limit = self._queues.get(queue, {}).get("x-delivery-limit", self._delivery_limit)
        assert isinstance(limit, int)
        return limit


def _step(before: Row | None, after: Row | None) -> tuple[str, str]:
    if before is None:
        assert after is not None
        return "new", "moved" if after.record.deaths else after.state
    if after is None:
        return before.state, "gone"
    return before.state, after.state if after.queue == before.queue else "moved"
