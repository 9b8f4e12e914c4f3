"""Broken twins: the engine with one guard taken out. Each must be caught, or the simulation proves nothing.

A twin names the guarantee it breaks and the profile in which it is to be found. Nothing of the engine is changed on
disk: an attribute is replaced while :func:`twin` is entered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from kit.simulation import wrong
from kombu_fdb.engine import copies, dead_letters, edit, parts, session, topology
from kombu_fdb.engine.facade import engine
from kombu_fdb.engine.facade.messages import Messages
from kombu_fdb.engine.facade.upkeep import Upkeep
from kombu_fdb.engine.messages import bury, claim, message, move, overflow, publish, settle
from kombu_fdb.engine.scheduling import fair, key_limits, limit_changes, single, wait_queue
from kombu_fdb.engine.scheduling.key_limits import Allowances
from kombu_fdb.engine.transactions import write
from kombu_fdb.engine.upkeep import expiry, promotion, quarantine, release
from kombu_fdb.engine.work import Effects, Work
from kombu_fdb.errors import CommitUnknown
from kombu_fdb.keyspace.codec import Record
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import Rank, SessionId, Stamp
from kombu_fdb.process import failure_detector
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.process.failure_detector import FailureDetector
from kombu_fdb.store import retry
from kombu_fdb.store.protocol import KeyValue, Transaction
from kombu_fdb.transport.consuming.dispatch import Credit, Dispatch
from kombu_fdb.transport.consuming.fetcher import Claiming, Fetcher


class Twin(NamedTuple):
    """``attribute`` of ``owner`` is replaced."""

    guarantee: str
    profile: str
    owner: Any
    attribute: str
    replacement: Any


class _NoConflictKeys:
    """A transaction that forgets the conflict keys and ranges it is given."""

    def __init__(self, inner: Transaction) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add_read_conflict_key(self, key: bytes) -> None:
        del key

    def add_read_conflict_range(self, begin: bytes, end: bytes) -> None:
        del begin, end


class _SnapshotReads(_NoConflictKeys):
    """Moreover, all its reads are snapshots."""

    def get(self, key: bytes, *, snapshot: bool = False) -> bytes | None:
        del snapshot
        return self._inner.get(key, snapshot=True)

    def get_many(self, keys: list[bytes], *, snapshot: bool = False) -> list[bytes | None]:
        del snapshot
        return self._inner.get_many(keys, snapshot=True)

    def get_range(
        self, begin: bytes, end: bytes, *, limit: int = 0, reverse: bool = False, snapshot: bool = False
    ) -> list[KeyValue]:
        del snapshot
        return self._inner.get_range(begin, end, limit=limit, reverse=reverse, snapshot=True)

    def get_ranges(self, ranges: list[tuple[bytes, bytes, int]], *, snapshot: bool = False) -> list[list[KeyValue]]:
        del snapshot
        return self._inner.get_ranges(ranges, snapshot=True)

    def get_together(
        self, keys: list[bytes], ranges: list[tuple[bytes, bytes, int]], *, snapshot: bool = False
    ) -> tuple[list[bytes | None], list[list[KeyValue]]]:
        del snapshot
        return self._inner.get_together(keys, ranges, snapshot=True)


def _blind(module: Any, verb: str) -> tuple[Any, str, Any]:
    """The verb without its conflict keys; what it reads serializably it reads at snapshot."""
    original = getattr(module, verb)
    return module, verb, lambda work, *args, **kwargs: original(_careless_work(work), *args, **kwargs)


def _careless_work(work: Work) -> Work:
    blind: Any = _SnapshotReads(work.tr)
    return work._replace(tr=blind)


def _careless(step: str, scheduler: Any = fair._Scheduler) -> tuple[Any, str, Any]:
    """The same for a step of the fair scheduler."""
    original = getattr(scheduler, step)

    def careless(self: Any, *args: Any) -> Any:
        careful, self._tr = self._tr, _SnapshotReads(self._tr)
        try:
            return original(self, *args)
        finally:
            self._tr = careful

    return scheduler, step, careless


def _without(owner: Any, attribute: str, result: Any = None) -> tuple[Any, str, Any]:
    """The step is not done at all."""
    return owner, attribute, lambda *_args, **_kwargs: result


class _Unexpected(Exception):
    """Not caught anywhere."""


_commit = retry.Retry._commit
_fence, _insert, _route_letter = session.fence, fair._Scheduler._insert, bury._route_letter
_put_ready, _release_part = message.put_ready, release.release_part


def _require_nothing(work: Work, _session_id: SessionId, *, and_read: list[bytes], ranges: Any = ()) -> Any:
    return work.tr.get_together(and_read, ranges, snapshot=True)


def _forgetful_fence(work: Work, session_id: SessionId, **given: Any) -> bool:
    work.tr.clear(work.keys.beat(session_id))
    return _fence(work, session_id, **given)


def _believe(_run: object, tr: Transaction, *_args: object) -> None:
    try:
        tr.commit()
    except CommitUnknown:
        return


def _forget_attempts(_run: object, tr: Transaction, *_args: object) -> None:
    tr.commit()


def _at_once(work: Work, queue: str, rank: Rank, _due_ms: int, message: Any) -> None:
    _put_ready(work, queue, "", rank, message)


def _everything_delayed(keys: Keyspace, queue: str, _now_ms: int) -> tuple[bytes, bytes]:
    prefix = keys.delayed(queue)
    return prefix, prefix + b"\xff"


def _first_grave(*args: Any) -> Any:
    queues, *rest = _route_letter(*args)
    return queues[:1], *rest


def _same_turn(scheduler: Any, key: str, items: Rank, _round: int, stamp: Stamp) -> Any:
    return _insert(scheduler, key, items, 0, stamp)


def _pause_anyway(run: retry.Retry, seconds: float, _deadline: float) -> bool:
    run.clock.sleep(seconds)
    return True


_ready = Effects.ready


def _silent_ready(effects: Effects, queue: str, size: int) -> None:
    bells = set(effects._bells)
    _ready(effects, queue, size)
    effects._bells &= bells


def _open_to_all(_work: object, queues: Sequence[str], *_: object) -> list[str]:
    return list(queues)


def _hand_over(work: Work, _limit: int, session_id: SessionId, *args: Any, **given: Any) -> tuple[int, bytes]:
    if work.tr.get(work.keys.session(session_id)) is None:
        single.leave_each(work, session_id, work.tr.get_range(*work.keys.all_singles, snapshot=True))
    return _release_part(work, 1, session_id, *args, **given)


def _take_each(tr: Transaction, run: Sequence[bytes]) -> None:
    for key in run:
        tr.add_read_conflict_key(key)
    tr.clear_run(run)


def _only_look(run: retry.Retry, tr: Transaction, doubt: retry.Doubt[Any]) -> bytes | None:
    return run._landed(tr, doubt)


def _commit_blindly(run: retry.Retry, tr: Transaction, *args: Any) -> None:
    _commit(run, _NoConflictKeys(tr), *args)


TWINS: dict[str, Twin] = {
    # Answers that are lost, commits that land late
    "a recovery does not fence": Twin("DURABLE", "late", *_without(session, "seal")),
    "a recovery only looks": Twin("DURABLE", "late", *_blind(session, "leases_of_claim")),
    "an exception leaves no suspect": Twin("DURABLE", "late", *_without(ClientSession, "_suspect")),
    "a suspect is never recovered": Twin("DURABLE", "late", *_without(ClientSession, "recover")),
    "publishing again ignores the doubt": Twin("ONE-PLACE", "late", *_without(publish.Doubts, "take")),
    "a doubt is looked at, not fenced": Twin("ONE-PLACE", "late", retry.Retry, "_fence", _only_look),
    "a commit does not conflict on its token": Twin("ONE-PLACE", "late", retry.Retry, "_commit", _commit_blindly),
    "an answer that comes too late is none": Twin("DURABLE", "stops", retry.Retry, "_commit", wrong.only_in_time),
    "an exception leaves its transaction open": Twin(
        "BOUNDED", "interrupts", retry.Retry, "_attempt", wrong.leave_open
    ),
    # Messages
    "a claim does not conflict on what it takes": Twin("ONE-PLACE", "claims", *_blind(claim, "take_rows")),
    "a run conflicts on its rows only": Twin("DURABLE", "sessions", parts, "take_run", _take_each),
    "a purge does not conflict with claims": Twin("COUNTS", "claims", *_blind(topology, "purge_part")),
    "a rescheduling does not conflict with claims": Twin("ONE-PLACE", "rescheduling", *_blind(edit, "reschedule")),
    "two promoters do not conflict": Twin("ONE-PLACE", "delays", *_blind(promotion, "promote")),
    "the sweep does not conflict on the leases": Twin("ONE-PLACE", "sessions", *_blind(release, "release_part")),
    "a payload outlives its message": Twin("ONE-PLACE", "claims", *_without(settle, "delete")),
    "a retry does not ask whether it has happened": Twin(
        "ONE-PLACE", "outages", retry.Retry, "_commit", _forget_attempts
    ),
    "an unknown commit counts as done": Twin("DURABLE", "outages", retry.Retry, "_commit", _believe),
    "a dead letter reaches one queue of several": Twin("DURABLE", "poison", bury, "_route_letter", _first_grave),
    "a queue expires under its consumer": Twin("DURABLE", "vanishing", *_blind(topology, "expire")),
    "what could not be rejected is released": Twin(
        "NOT-TWICE",
        "connections",
        Client,
        "settle_later",
        lambda client, lease, *_, **__: client.release_later([lease]),
    ),
    "closing settles a part": Twin("NOT-TWICE", "stops", Client, "_end", wrong.settle_a_part),
    # Owners
    "a claim does not look at its session": Twin("ONE-OWNER", "sessions", session, "require", _require_nothing),
    "a claim does not conflict with the end of its session": Twin("ONE-OWNER", "sessions", *_blind(session, "require")),
    "an acknowledgement does not conflict on the lease": Twin("ONE-PLACE", "sessions", *_blind(settle, "_take_leases")),
    "an outage counts as silence": Twin(
        "NOT-TWICE", "outages", failure_detector, "counted_gap", lambda gap_s, _longest_s: gap_s
    ),
    "fencing ignores the last beat": Twin(
        "NOT-TWICE", "sessions", session, "fence", lambda work, session_id, **_: _fence(work, session_id)
    ),
    "no sweeper goes on where a dead one stopped": Twin("BACK-SOON", "sessions", session, "fence", _forgetful_fence),
    "no session is ever silent": Twin("BACK-SOON", "sessions", *_without(FailureDetector, "silent", [])),
    "delayed messages are not asked whether they are due": Twin(
        "NOT-EARLY", "delays", Keyspace, "delayed_until", _everything_delayed
    ),
    "a delay is not kept": Twin("NOT-EARLY", "delays", publish, "put_delayed", _at_once),
    # Poison
    "deliveries are not counted": Twin("POISON-ENDS", "poison", Record, "redelivered", lambda value: value),
    "the delivery limit is not looked at": Twin("POISON-ENDS", "poison", *_without(settle, "over_limit", False)),
    "malformed bytes are not expected": Twin("POISON-ENDS", "poison", message, "FormatError", _Unexpected),
    # Keys
    "a key goes idle without a look at its whole range": Twin("FAIR", "fair", *_careless("_retire")),
    "an arrival is admitted at snapshot": Twin("FAIR", "fair", *_careless("_idle")),
    "messages without a key are admitted at snapshot": Twin("FAIR", "", *_careless("_idle_unkeyed")),
    "a key is parked without a look at what ends meanwhile": Twin("FAIR", "limits", *_careless("_park")),
    "an ended lease frees no key": Twin("FAIR", "limits", *_without(Effects, "spared")),
    "a served key keeps its turn": Twin("FAIR", "turns", fair._Scheduler, "_insert", _same_turn),
    "claims of one limited key do not exclude each other": Twin(
        "KEY-LIMIT", "", *_careless("_exclude_others", Allowances)
    ),
    "a claim does not conflict with how its queues are worked on": Twin("KEY-LIMIT", "pauses", *_blind(claim, "_read")),
    "acks of who joins do not conflict with the first limit": Twin("FAIR", "", *_blind(claim, "control_keys")),
    "limits are read at snapshot": Twin("KEY-LIMIT", "limits", *_careless("load", Allowances)),
    "a turn stays where another priority was": Twin("FAIR", "limits", *_without(limit_changes, "_misplaced", [])),
    "a limit changed rings no bell": Twin("FAIR", "limits", *_without(limit_changes, "_ring")),
    # Single active consumers
    "consumers become active without a look at each other": Twin("ONE-ACTIVE", "single", *_blind(single, "admitted")),
    "a consumer leaves without a look at who is active": Twin(
        "ONE-ACTIVE", "single", *_blind(topology, "remove_consumer")
    ),
    "a session leaves without a look at who is active": Twin("ONE-ACTIVE", "single", *_blind(single, "leave_each")),
    "a claim does not ask who is active": Twin("ONE-ACTIVE", "single", claim, "_open_to", _open_to_all),
    "a consumer leaves before its claims are back": Twin(
        "ONE-ACTIVE", "single", ClientSession, "end_consumers", wrong.end_at_once
    ),
    "the place is free before the messages are back": Twin("ONE-ACTIVE", "single", release, "release_part", _hand_over),
    # Publishing once
    "two publishers of one dedup id do not conflict": Twin(
        "ONCE-PUBLISHED", "repeats", *_blind(publish, "without_duplicates")
    ),
    "a dedup id is cleared without a look at who has published it since": Twin(
        "ONCE-PUBLISHED", "repeats", *_blind(publish, "clear_ended")
    ),
    "a dedup id is cleared by the clock of the process that clears it": Twin(
        "ONCE-PUBLISHED", "clocks", Upkeep, "clear_dedup_part", wrong.clear_at_once
    ),
    # Clocks
    "the window of a dedup id never ends": Twin("SKEW", "clocks", *_without(publish, "decode_end", 2**62)),
    "a message that comes back lives anew": Twin("SKEW", "clocks", Record, "redelivered", wrong.live_anew),
    "the time to live is not looked at": Twin("SKEW", "clocks", claim, "take", wrong.never_expired),
    "a rate counts its time twice": Twin("SKEW", "rates", key_limits, "refilled", wrong.fill_twice),
    "a rate counts by the clock of the process that looks": Twin(
        "SKEW", "rates", key_limits, "refilled", wrong.fill_by_own_clock
    ),
    "a promoter believes no clock but its own": Twin("SKEW", "waits", *_without(key_limits, "known_for_ms", 0)),
    # Tasks and letters
    "a cancel does not conflict with claims": Twin(
        "COUNTS", "tasks", Messages, "_cancel_part", write(_blind(edit, "cancel")[2])
    ),
    "a move does not conflict with claims": Twin("ONE-PLACE", "tasks", *_blind(move, "_take")),
    "a promotion is not told to the index": Twin("COUNTS", "tasks", *_without(promotion, "forget")),
    "two replays do not conflict": Twin("ONE-PLACE", "letters", *_blind(dead_letters, "_take")),
    # Numbers and bounds
    "a sweep counts nothing": Twin("COUNTS", "sessions", *_without(release, "end_lease")),
    "a key's leases are not counted": Twin("COUNTS", "limits", *_without(Effects, "leased")),
    "a retry knows no deadline": Twin("BOUNDED", "outages", retry.Retry, "_pause", _pause_anyway),
    "dead letters are kept for ever": Twin("BOUNDED", "poison", *_without(dead_letters, "trim", 0)),
    "what a queue grew by other than publishing stays": Twin("BOUNDED", "full", *_without(overflow, "trim", 0)),
    # Duties
    "no duty has any budget": Twin("BACK-SOON", "sessions", *_without(parts.Budget, "spend", False)),
    "a duty takes more than its turn": Twin("BOUNDED", "turns of duties", *_without(parts.Budget, "spend", True)),
    "sessions do not observe their neighbours": Twin(
        "BACK-SOON", "sessions", *_without(engine.Sessions, "neighbours", [])
    ),
    "what gives way is not looked at": Twin("COUNTS", "full", *_blind(overflow, "_trim")),
    "what has expired is not looked at": Twin("COUNTS", "", *_blind(expiry, "drop_part")),
    "an orphan is not looked at": Twin("DURABLE", "", *_blind(quarantine, "clear_queue")),
    "a copy is taken without a look at who clears it": Twin("DURABLE", "", *_blind(copies, "take")),
    "two that bring newer messages back do not conflict": Twin("ONE-PLACE", "", *_blind(release, "regain_part")),
    "a ready message rings no bell": Twin("BOUNDED", "claims", Effects, "ready", _silent_ready),
    "without a key a message of a fair queue wakes no consumer": Twin(
        "BOUNDED", "fair", publish, "put_ready", wrong.wake_for_keys
    ),
    # Connections
    "a receiver clears its bell after the look": Twin(
        "DURABLE", "connections", Fetcher, "turn", wrong.clear_after_the_look
    ),
    "the acks of a claim that failed are forgotten": Twin(
        "DURABLE", "connections", Claiming, "_with_acks", wrong.forget_the_acks
    ),
    "what a fenced session had claimed is handed out": Twin("ONE-OWNER", "fenced", *_without(Dispatch, "drop_session")),
    "what waits is not counted against the prefetch": Twin(
        "BOUNDED", "connections", Credit, "_free", property(wrong.count_what_is_held)
    ),
    # Wait queues
    "who serves does not look at who has left": Twin("ONE-OWNER", "", *_blind(wait_queue, "grant")),
    "who leaves does not look at what he was granted": Twin(
        "DURABLE", "waiters", ClientSession, "leave", wrong.just_leave
    ),
    "a recovery leaves its demand in the wait queue": Twin(
        "ONE-OWNER", "", engine, "wait_queue", SimpleNamespace(drop=lambda *_: None)
    ),
    "demands outlive their sessions": Twin("BOUNDED", "waiters", *_without(wait_queue, "forget")),
    "room is promised twice": Twin("BOUNDED", "successors", Claiming, "restrict", wrong.promise_twice),
    "a cancelled consumer keeps what waits for it": Twin(
        "DURABLE", "connections", Dispatch, "remove", wrong.keep_what_waits
    ),
}


@contextmanager
def twin(name: str) -> Iterator[Twin]:
    """The engine without one of its guards."""
    chosen = TWINS[name]
    original = vars(chosen.owner)[chosen.attribute]
    setattr(chosen.owner, chosen.attribute, chosen.replacement)
    try:
        yield chosen
    finally:
        setattr(chosen.owner, chosen.attribute, original)
