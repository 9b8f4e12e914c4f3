"""What a history says of each guarantee of ``docs/guarantees.md``: pure functions, each with its anomaly.

From Jepsen come the three outcomes of a call (``ok``, ``fail``, ``info``: an unknown one may have happened or not, now
or later), and of its checker ``total-queue`` the multisets: *lost* is what was acknowledged and never came out,
*unexpected* what came out and was never put in, *duplicated* what came out more often than it was put in. There is no
search for a linearization, as with Knossos: a message's name is unique, so each delivery names its publication. From
Elle comes what that makes possible (*recoverability*): the order of the commits is inferred from what was seen, and two
facts about one pair of messages that contradict each other are a cycle, which is the whole witness. As in Elle's
real-time graphs, one call comes before another if it was answered before the other was invoked.

Every verdict is sound: what a check calls violated can't have been otherwise. Where the history leaves it open (an
unknown answer, clocks that can't be compared, a message that was in a struck session's hands), the check takes it as
the promise would have it. ``exercised`` counts the occasions on which it could have found a violation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from kit.history.events import Call, Delivery, Event, Fault, History

#: What a call may take beyond its deadline: to raise its error, and to write down both ends.
GRACE_S = 1.0
#: Between a death and the next start, besides TTL, sweeps and faults: a claim, and a task that is in its way.
WAY_S = 5.0
#: Beyond this skew a rate is not promised, nor a dedup window, in seconds.
RATE_SKEW_S, DEDUP_SKEW_S = 600.0, 900.0
#: A clock's reading is rounded to milliseconds where it is stored.
ROUNDING_S = 0.002


class Violation(NamedTuple):
    """``events``: the shortest history that shows it."""

    text: str
    events: tuple[Event, ...]


class Finding(NamedTuple):
    """What one check found."""

    exercised: int
    violations: list[Violation]


Check = Callable[[History], Finding]


def _mono_s(event: Event) -> float:
    return event.mono_s


def _events(history: History, *messages: str) -> tuple[Event, ...]:
    """All that happened to some messages."""
    found: list[Event] = []
    for message in messages:
        for call in history.publishes.get(message, ()):
            found += call.events
        for delivery in history.deliveries.get(message, ()):
            found += delivery.events
    return tuple(sorted(found, key=lambda each: each.mono_s))


def _logical(history: History) -> dict[str, list[str]]:
    """The names of what is one message: those that were published with one dedup id to one queue."""
    found = defaultdict[str, list[str]](list)
    for message in history.publishes:
        dedup = history.of(message, "dedup")
        found[f"dedup id {dedup}" if dedup else message].append(message)
    return found


# -- what was put in, and what came out --------------------------------------------------------------------------------


def lost(history: History) -> Finding:
    """Acknowledged, and neither finished, nor purged, nor in the store at the end."""
    if history.final is None:
        return Finding(0, [])
    exercised, violations = 0, []
    for name, messages in _logical(history).items():
        calls = [call for each in messages for call in history.publishes[each]]
        if not any(each.outcome == "ok" for each in calls):
            continue
        exercised += 1
        ended = any(
            each.how in {"done", "perhaps", "retried"} for m in messages for each in history.deliveries.get(m, ())
        )
        if not ended and not any(each in history.stored for each in messages) and not _purged(history, calls):
            violations.append(Violation(f"{name} was acknowledged, and is gone", _events(history, *messages)))
    return Finding(exercised, violations)


def _purged(history: History, published: Iterable[Call]) -> bool:
    """Whether a purge or a discard may have met it."""
    verbs = [*history.calls["purge"], *history.calls["discard"]]
    return any(
        verb.invoked["queue"] == call.invoked["queue"] and verb.outcome != "fail" and not verb.is_before(call.invoked)
        for call in published
        for verb in verbs
    )


def unexpected(history: History) -> Finding:
    """Delivered or stored, and never published, or only by calls that said that nothing had happened."""
    found = history.deliveries.keys() | history.stored.keys()
    violations = [
        Violation(f"{each} came out and was never put in", _events(history, each))
        for each in sorted(found)
        if history.attempts(each) == 0
    ]
    return Finding(len(found), violations)


def stored_twice(history: History) -> Finding:
    """In the store at the end more often than published, or in spite of an answered ack."""
    violations = []
    for message, places in history.stored.items():
        acks = _acks(history, message)
        if len(places) + len(acks) > history.attempts(message):
            text = f"{message}: {len(places)} in the store ({places}), {len(acks)} acked"
            violations.append(Violation(text, _events(history, message)))
    return Finding(len(history.publishes) if history.final else 0, violations)


def acked_twice(history: History) -> Finding:
    """More acks were accepted than there were messages, or it was taken after its ack had been answered."""
    exercised, violations = 0, []
    for message in history.deliveries:
        acks = _acks(history, message)
        exercised += len(acks)
        if len(acks) > history.attempts(message):
            violations.append(Violation(f"{message} was acked {len(acks)} times", _events(history, message)))
        elif acks and len(acks) == history.attempts(message):
            late = [
                each
                for each in history.deliveries[message]
                if all(ack.is_before(each.asked or each.begun) for ack in acks)
            ]
            if late:
                violations.append(Violation(f"{message} came out after its ack", _events(history, message)))
    return Finding(exercised, violations)


def _acks(history: History, message: str) -> list[Call]:
    return [each.settled for each in history.deliveries.get(message, ()) if each.how == "done" and each.settled]


def doubled(history: History) -> Finding:
    """Delivered again although its owner lived and had not given it up."""
    exercised, violations = 0, []
    for message, deliveries in history.deliveries.items():
        exercised += 1
        kept = 1
        for one, following in pairwise(deliveries):
            kept += not (_given_up(history, one, following.begun) or _is_late(history, following))
        if kept > max(1, history.attempts(message)):
            owners = ", ".join(each.owner for each in deliveries)
            violations.append(Violation(f"{message} was begun by {owners}", _events(history, message)))
    return Finding(exercised, violations)


def _is_late(history: History, delivery: Delivery) -> bool:
    """Whether its owner may have lost the message between the claim and the beginning, which alone is recorded."""
    parted = history.parted(delivery)
    return parted is not None and parted.precedes(delivery.begun)


def _given_up(history: History, delivery: Delivery, now: Event) -> bool:
    gave_up = delivery.how in {"released", "perhaps"} or (delivery.how == "buried" and _replayed(history, delivery))
    if gave_up and (delivery.ended is None or not now.precedes(delivery.ended)):
        return True
    parted = history.parted(delivery)
    return parted is not None and not now.precedes(parted)


def _replayed(history: History, delivery: Delivery) -> bool:
    queue = history.of(delivery.message, "queue")
    replays = [each for each in history.calls["replay"] if each.invoked["queue"] == queue and each.outcome != "fail"]
    return any(delivery.ended is None or not each.is_before(delivery.ended) for each in replays)


def once_published(history: History) -> Finding:
    """Two messages with one dedup id came out, within the window by whichever clock."""
    exercised, violations = 0, []
    for name, messages in _logical(history).items():
        if not history.of(messages[0], "dedup"):
            continue
        exercised += len(messages) > 1
        out = [each for each in messages if each in history.deliveries or each in history.stored]
        pairs = [(one, other) for one in out for other in out if one < other]
        for one, other in pairs:
            if _in_window(history, history.publishes[one][0].invoked, history.publishes[other][0].invoked):
                violations.append(Violation(f"{name} came out as {one} and {other}", _events(history, one, other)))
                break
    return Finding(exercised, violations)


def _in_window(history: History, one: Event, other: Event) -> bool:
    ahead = max(history.offsets_s[each.clock][1] - (each.wall_s - each.mono_s) for each in (one, other))
    return abs(one.wall_s - other.wall_s) < one["window"] and ahead < DEDUP_SKEW_S


# -- when --------------------------------------------------------------------------------------------------------------


def early(history: History) -> Finding:
    """Begun before it was due, even by the clock that was furthest ahead.

    It is due at its publisher's time of the invocation, plus its delay. Which process made it ready is not known.
    """
    exercised, violations = 0, []
    for message, deliveries in history.deliveries.items():
        call = history.publishes.get(message, [None])[0]
        delay = call.invoked["delay"] if call else None
        if call is None or not delay:
            continue
        for each in deliveries:
            exercised += 1
            latest = each.begun.mono_s + history.offsets_s[each.begun.clock][1]
            due = call.invoked.wall_s + delay
            if latest < due - ROUNDING_S:
                text = f"{message} was begun {due - latest:.3f} s before it was due"
                violations.append(Violation(text, (call.invoked, each.begun)))
    return Finding(exercised, violations)


def overdue(history: History) -> Finding:
    """A call that took longer than its deadline, without the time for which its process or its machine stood still."""
    return _late([call for calls in history.calls.values() for call in calls if call.invoked["op"] != "stop"], history)


def stopped_late(history: History) -> Finding:
    """A process that was told to end, and took longer than it may."""
    return _late(history.calls["stop"], history)


def _late(calls: Iterable[Call], history: History) -> Finding:
    exercised, violations = 0, []
    last = {(each.who, each.pid): each for each in history.events}
    for call in calls:
        deadline = call.invoked["deadline"]
        if deadline is None:
            continue
        exercised += 1
        end = call.answered or last[call.invoked.who, call.invoked.pid]
        took = end.mono_s - call.invoked.mono_s
        if took > deadline + GRACE_S and took - history.idle_s(call, end) > deadline + GRACE_S:
            text = f"{call.invoked['op']} by {call.invoked.who} took {took:.1f} s of {deadline:g}"
            violations.append(Violation(text, call.events if call.answered else (call.invoked, end)))
    return Finding(exercised, violations)


def back_late(history: History) -> Finding:
    """What a dead process held was not begun again in time, or is still in the store when nothing moves any more.

    In time: TTL, two sweeps, and as long as the cluster was struck or others were.
    """
    exercised, violations = 0, []
    in_time_s = history.ttl_s + 2 * float(history.setup.get("sweep_interval", 5.0)) + WAY_S
    for message, deliveries in history.deliveries.items():
        for one, following in zip_longest(deliveries, deliveries[1:]):
            fault = _fatal(history, one, following)
            if fault is None:
                continue
            begin = max(one.begun, fault.begun, key=_mono_s)
            end = min(filter(None, (history.ends(fault), following and following.begun)), key=_mono_s)
            others = sum(each.overlap_s(begin, end) for each in history.faults if each is not fault)
            waited = end.mono_s - begin.mono_s - others - history.stood_s(begin, end)
            exercised += waited > 0
            if waited > in_time_s:
                text = f"{message} was not back {end.mono_s - begin.mono_s:.1f} s after {fault.name}"
                violations.append(Violation(text, (one.begun, fault.begun, end)))
    kept = history.queues("kept")
    for message, places in history.stored.items():
        for queue, state in places:
            if (
                queue not in kept
                and history.attempts(message)
                and not (state == "delayed" and _not_due(history, message))
            ):
                violations.append(Violation(f"{message} is still {state} in {queue}", _events(history, message)))
    return Finding(exercised, violations)


def _not_due(history: History, message: str) -> bool:
    """By the clock of a publisher that was ahead (SKEW)."""
    final = history.final
    assert final is not None
    return any(
        call.invoked["delay"] and call.invoked.wall_s + call.invoked["delay"] > final.wall_s
        for call in history.publishes[message]
    )


def _fatal(history: History, one: Delivery, following: Delivery | None) -> Fault | None:
    """The kill or the long pause that took a delivery from its owner; without a next one, the pause that should have.

    A fault begins a moment before it takes hold, and what had just ended was held if its ack did not land. Left out is
    what may have come back for another reason: it was released or published twice, or was dead and replayed.
    """
    limited = history.of(one.message, "queue") in history.queues("delivery_limit")
    if limited or one.how in {"released", "buried"} or history.attempts(one.message) > 1:
        return None
    for each in reversed(history.severe(one.owner)):
        held = one.ended is None or each.begun.mono_s - one.ended.mono_s < GRACE_S
        if following is not None:
            lost = each.begun.precedes(following.begun)
        else:
            lost = one.how == "done" and each.overlap_s(one.begun, one.ended or one.begun) >= history.ttl_s
        if each.stops and held and lost:
            return each
    return None


# -- in which order ----------------------------------------------------------------------------------------------------


def disordered(history: History) -> Finding:
    """Published in one order, begun in the other: by one consumer, or by one at a time of a key."""
    ordered = history.queues("ordered")
    lines = defaultdict[tuple[str, ...], list[tuple[Call, Delivery]]](list)
    for message, deliveries in history.deliveries.items():
        calls = history.publishes.get(message, [])
        if (
            len(calls) == 1
            and calls[0].outcome == "ok"
            and not calls[0].invoked["delay"]
            and not calls[0].invoked["dedup"]
        ):
            queue, key = history.key(message)
            if queue in ordered:
                line = (queue, str(history.of(message, "priority") or 0), key if ordered[queue] == "key" else "")
                lines[line].append((calls[0], deliveries[0]))
    exercised, violations = 0, []
    for pairs in lines.values():
        pairs.sort(key=lambda pair: pair[1].begun.mono_s)
        latest = None
        for pair in pairs:
            if latest is not None:
                exercised += 1
                if pair[0].is_before(latest[0].invoked) and latest[1].begun.precedes(pair[1].asked or pair[1].begun):
                    text = f"{pair[1].message} was put in before {latest[1].message}, and came out after it"
                    events = (*pair[0].events, *latest[0].events, latest[1].begun, pair[1].begun)
                    violations.append(Violation(text, events))
            if latest is None or latest[0].invoked.mono_s < pair[0].invoked.mono_s:
                latest = pair
    return Finding(exercised, violations)


def over_limit(history: History) -> Finding:
    """More of a key's messages were held at one moment than its limit allows."""
    limits = history.queues("max_in_flight")
    held = defaultdict[tuple[str, str], list[Delivery]](list)
    for each in _held(history):
        queue, key = history.key(each.message)
        if queue in limits:
            held[queue, key].append(each)
    exercised, violations = 0, []
    for (queue, key), deliveries in held.items():
        exercised += len(deliveries)
        for crowd in _crowds(history, deliveries):
            if len(crowd) > limits[queue]:
                text = f"{len(crowd)} of key {key} in {queue} at once, of {limits[queue]}"
                violations.append(Violation(text, tuple(event for each in crowd for event in each.events)))
    return Finding(exercised, violations)


def two_active(history: History) -> Finding:
    """Two consumers of a queue with a single active one held messages at one moment."""
    single = history.queues("single")
    held = defaultdict[str, list[Delivery]](list)
    for each in _held(history):
        if (queue := history.of(each.message, "queue")) in single:
            held[queue].append(each)
    exercised, violations = 0, []
    for queue, deliveries in held.items():
        exercised += sum(one.owner != other.owner for one, other in pairwise(deliveries))
        for crowd in _crowds(history, deliveries):
            if len({each.owner for each in crowd}) > 1:
                text = f"{queue} served {', '.join(sorted({each.owner for each in crowd}))} at once"
                violations.append(Violation(text, tuple(event for each in crowd for event in each.events)))
    return Finding(exercised, violations)


def _held(history: History) -> list[Delivery]:
    """Deliveries that were certainly leases, in the order in which they began."""
    found = []
    for deliveries in history.deliveries.values():
        for each in deliveries:
            parted = history.parted(each)
            if each.ended is not None and (parted is None or each.begun.precedes(parted)):
                found.append(each)
    return sorted(found, key=lambda each: each.begun.mono_s)


def _crowds(history: History, deliveries: Sequence[Delivery]) -> Iterator[list[Delivery]]:
    """At each beginning: all that had begun and not ended."""
    held: list[tuple[Event, Delivery]] = []
    for each in deliveries:
        held = [pair for pair in held if each.begun.precedes(pair[0])]
        parted = history.parted(each)
        assert each.ended is not None
        end = each.ended if parted is None or each.ended.precedes(parted) else parted
        if each.begun.precedes(end):
            held.append((end, each))
        yield [one for _, one in held]


def behind(history: History) -> Finding:
    """A key waited for more than 2K services: of takes that began after it had come, and ended before its own did.

    K: the keys that were ever published to the queue. If a session was struck meanwhile, or a take's answer is not
    known, messages are in hands that no taker knows of, and nothing is concluded. Nor is it before the last take of the
    release with which a run begins: among several consumers, that one lets some keys wait for much longer.
    """
    exercised, violations = 0, []
    for queue in history.queues("fair"):
        keys = {history.key(each)[1] for each in history.publishes if history.of(each, "queue") == queue}
        firsts = [each[0] for each in history.deliveries.values() if history.of(each[0].message, "queue") == queue]
        served = sorted((each for each in firsts if each.asked), key=lambda each: each.begun.mono_s)
        takes = [each for each in history.calls["take"] if each.invoked["queue"] == queue]
        unknown = [each.invoked for each in takes if each.outcome != "ok"]
        by_release = [each.events[-1].mono_s for each in takes if each.invoked.who in history.released]
        before: dict[str, Event] = {}
        for number, each in enumerate(served):
            assert each.asked is not None
            key, calls = history.key(each.message)[1], history.publishes[each.message]
            since = max(
                (event for event in (calls[0].answered, before.get(key)) if event), key=lambda e: e.mono_s, default=None
            )
            before[key] = each.begun
            if (
                since is None
                or since.mono_s < max(by_release, default=0.0)
                or calls[0].outcome != "ok"
                or _disturbed(history, unknown, since, each.begun)
            ):
                continue
            exercised += 1
            others = [
                one
                for one in served[:number]
                if one.asked and since.precedes(one.asked) and one.begun.precedes(each.asked)
            ]
            if len(others) > 2 * len(keys):
                text = f"{key} waited for {len(others)} services in {queue}, with {len(keys)} keys"
                violations.append(Violation(text, (since, *(one.begun for one in others), each.begun)))
    return Finding(exercised, violations)


def _disturbed(history: History, unknown: Iterable[Event], since: Event, until: Event) -> bool:
    lately_s = since.mono_s - 2 * history.ttl_s
    return any(lately_s < each.mono_s < until.mono_s for each in unknown) or any(
        each.struck and each.begun.mono_s < until.mono_s and (each.over is None or each.over.mono_s > lately_s)
        for each in history.faults
    )


def too_fast(history: History) -> Finding:
    """More of a key's messages were claimed within some time than its burst, and its rate by clocks that differ."""
    exercised, violations = 0, []
    skew_s = max((most - least for least, most in history.offsets_s.values()), default=0.0)
    for queue, (rate, burst) in history.queues("rate").items():
        takes = defaultdict[str, list[Delivery]](list)
        for deliveries in history.deliveries.values():
            for each in deliveries:
                if each.asked is not None and history.of(each.message, "queue") == queue:
                    takes[history.key(each.message)[1]].append(each)
        if skew_s > RATE_SKEW_S:
            continue
        for key, taken in takes.items():
            taken.sort(key=lambda each: each.begun.mono_s)
            asked = sorted(each.asked.mono_s for each in taken if each.asked)
            exercised += len(taken)
            for number, each in enumerate(taken):
                assert each.asked is not None
                for end in taken[number:]:
                    # Those asked for since, less those answered later.
                    later = len(taken) - 1 - taken.index(end)
                    within = len(asked) - bisect_left(asked, each.asked.mono_s) - later
                    allowed = burst + rate * (end.begun.mono_s - each.asked.mono_s + skew_s)
                    if within > allowed + 1:
                        text = f"{within} of key {key} in {end.begun.mono_s - each.asked.mono_s:.2f} s"
                        violations.append(
                            Violation(text, tuple(one.begun for one in taken[number : taken.index(end) + 1]))
                        )
    return Finding(exercised, violations)


def undying(history: History) -> Finding:
    """Delivered more often than its queue's limit, and as often again for each replay."""
    exercised, violations = 0, []
    for queue, limit in history.queues("delivery_limit").items():
        replays = sum(each.outcome != "fail" for each in history.calls["replay"] if each.invoked["queue"] == queue)
        for message, deliveries in history.deliveries.items():
            if history.of(message, "queue") == queue:
                exercised += 1
                if len(deliveries) > (limit + 1) * (1 + replays) * max(1, history.attempts(message)):
                    text = f"{message} was delivered {len(deliveries)} times, of {limit + 1}"
                    violations.append(Violation(text, _events(history, message)))
    return Finding(exercised, violations)


# -- what is left ------------------------------------------------------------------------------------------------------


def miscounted(history: History) -> Finding:
    """Counters that a full scan contradicts, at the end."""
    final = history.final
    if final is None:
        return Finding(0, [])
    return Finding(1, [Violation(each, (final,)) for each in final["counts"] or ()])


def orphaned(history: History) -> Finding:
    """Rows of sessions that have ended, and rows that are left when all queues are dropped."""
    final = history.final
    if final is None:
        return Finding(0, [])
    return Finding(1, [Violation(f"left behind: {each}", (final,)) for each in final["leftovers"] or ()])


#: By the guarantee's tag; those that have none are named by their section, or by what a process may take to end.
CHECKS: dict[str, tuple[Check, ...]] = {
    "ONE-PLACE": (unexpected, stored_twice),
    "ONE-OWNER": (acked_twice,),
    "DURABLE": (lost,),
    "NOT-EARLY": (early,),
    "BACK-SOON": (back_late,),
    "NOT-TWICE": (doubled,),
    "ONE-ACTIVE": (two_active,),
    "POISON-ENDS": (undying,),
    "FAIR": (behind,),
    "KEY-LIMIT": (over_limit,),
    "ONCE-PUBLISHED": (once_published,),
    "SKEW": (too_fast,),
    "COUNTS": (miscounted,),
    "BOUNDED": (overdue,),
    "Order": (disordered,),
    "Stop": (stopped_late,),
    "Empty": (orphaned,),
}
