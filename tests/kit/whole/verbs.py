"""Every verb of the engine's facade as one call on a :class:`~kit.whole.stage.Stage`.

A verb in parts is called until it has come to its end, as its callers do. The tests that use this table fail for a verb
that is missing in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from kit.whole.stage import LARGE, Stage
from kombu_fdb.engine import topology, transfer
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.metrics.samples import SERIES
from kombu_fdb.engine.scheduling import limit_changes
from kombu_fdb.engine.transactions import Transactions
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.model import (
    ClaimTerms,
    Delivery,
    Demand,
    KeyLimits,
    Lease,
    Peeked,
    Publication,
    QueueControl,
    Spot,
    State,
    StoredMessage,
    View,
)
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

Verb = Callable[[Stage], object]
ALL = 100_000


def facade_verbs(engine: Engine) -> set[str]:
    """The names of all methods of all groups, but of that which runs them."""
    groups = {name: each for name, each in vars(engine).items() if type(each).__module__.startswith(_FACADE)}
    return {
        f"{name}.{verb}"
        for name, group in groups.items()
        if not isinstance(group, Transactions)
        for verb in dir(group)
        if not verb.startswith("_") and callable(getattr(group, verb))
    }


_FACADE = "kombu_fdb.engine."


def _in_turn(*verbs: Verb) -> Verb:
    """One after the other."""

    def run(stage: Stage) -> None:
        for verb in verbs:
            verb(stage)

    return run


def _much_later(stage: Stage) -> None:
    """When dead letters are kept no longer."""
    stage.clock.advance(15 * 24 * 3600.0)


def _batch(stage: Stage) -> list[Publication]:
    """To many keys of two queues, one of which is full, and whose keys have limits."""
    sizes = stage.sizes
    bound = [
        Publication("x", f"k{number % sizes.bindings}", b"p", key=f"new{number}", task_id="new")
        for number in range(sizes.messages)
    ]
    limited = [Publication("", "fair", b"p", key=f"key{number}") for number in range(sizes.keys)]
    once = [Publication("", "q", b"p", dedup_id=f"new{number}", dedup_window_ms=10) for number in range(sizes.messages)]
    return [*bound, *limited, *once, Publication("", "full", b"p"), Publication("", "q", LARGE)]


def _atomically(stage: Stage) -> None:
    with stage.engine.publisher.atomically(lambda tr: None):
        stage.engine.publisher.publish(_batch(stage))


def _page(stage: Stage, state: State = "ready", queue: str = "q") -> list[Spot]:
    listed = stage.engine.inspect.page(queue, View(state), 50).messages
    return [Spot(state, each.position, each.message.message_id) for each in listed]


def _ids(messages: list[Peeked]) -> list[bytes]:
    return [each.message_id for each in messages]


def _walk(stage: Stage, part: Callable[[Any, bytes], tuple[Any, bytes]]) -> None:
    walk, cursor = stage.engine.dead_letters.walk("q.dead"), b""
    while True:
        _, cursor = part(walk, cursor)
        if not cursor:
            return


def _until_nothing(part: Callable[[], object]) -> None:
    while part():
        pass


def _by_cursor(part: Callable[[bytes], bytes]) -> None:
    cursor = part(b"")
    while cursor:
        cursor = part(cursor)


def _later(stage: Stage) -> Engine:
    """When all that is delayed is due, and all that expires has."""
    stage.clock.advance(3_600.0)
    return stage.engine


def _first_demand(stage: Stage) -> Demand:
    return stage.store.demands[0]


def _serve(stage: Stage) -> None:
    sight, _ = stage.engine.messages.look(_first_demand(stage))
    stage.engine.messages.serve(_first_demand(stage), ["q"], sight.waiting, lambda: 1.0)


def _join(stage: Stage) -> None:
    demand = Demand(_first_demand(stage).wait_queue, stage.session, stage.engine.messages.reserve(), 2)
    stage.engine.messages.join(demand, stage.store.leases, queues=["q"])


def _depose(stage: Stage) -> None:
    sight, _ = stage.engine.messages.look(stage.store.demands[1])
    stage.engine.messages.evict(stage.store.demands[1], sight.first, 1.0)


def _claim(stage: Stage) -> list[Delivery]:
    """Where it becomes the active consumer, and then with the acks of what it holds."""
    behind = stage.store.leases[-1].number + ALL  # this engine has not given the numbers of what it holds
    terms = ClaimTerms(first=behind, consumers={"lone": "tag"})
    lone = stage.engine.messages.claim(stage.session, ["lone", "other0"], ALL, terms=terms)
    queues, terms = ["q", "fair", "ttl", "expires", "single"], ClaimTerms(acks=stage.store.leases)
    return lone + stage.engine.messages.claim(stage.session, queues, ALL, terms=terms)


def _declare_again(stage: Stage) -> None:
    """A queue whose end is not done."""
    stage.engine.transactions.write(lambda work: work.tr.set(work.keys.deleting("before"), b"\xff" * 10))
    stage.engine.publisher.publish([Publication("", "before", b"") for _ in range(stage.sizes.messages)])
    stage.engine.queues.declare(QueueDeclaration("before", exclusive=True), owner=(stage.session, "tag"))


def _deleting(stage: Stage) -> None:
    """As the first transaction of a deletion leaves it."""
    for queue in ("q", "fair"):
        stage.engine.queues._delete(queue, partial(topology.delete_queue, queue=queue))


def _finish_deletion(stage: Stage) -> None:
    _deleting(stage)
    for queue in stage.engine.queues.being_deleted():
        stage.engine.queues.finish_deletion(queue)


def _finish_deletion_parts(stage: Stage) -> None:
    _deleting(stage)
    for queue in stage.engine.queues.being_deleted():
        _by_cursor(partial(stage.engine.queues.finish_deletion_part, queue))


def _purge_in_parts(stage: Stage) -> None:
    _by_cursor(lambda mark: stage.engine.queues.purge_some("q", mark)[1])


def _expire(stage: Stage) -> None:
    for queue, last_use, _ in stage.engine.queues.expiring():
        stage.engine.queues.expire(queue, last_use)


def _end_session(stage: Stage) -> None:
    """All steps of a sweep."""
    sessions = stage.engine.sessions
    beats = {session: beat for session, beat, _ in sessions.beats()}
    sessions.fence(stage.store.dead, beats[stage.store.dead])
    _by_cursor(lambda cursor: sessions.release_part(stage.store.dead, cursor)[1])
    _until_nothing(lambda: sessions.forget_part(stage.store.dead))


def _fence(stage: Stage) -> bool:
    beats = {session: beat for session, beat, _ in stage.engine.sessions.beats()}
    return stage.engine.sessions.fence(stage.store.dead, beats[stage.store.dead])


def _release_session(stage: Stage) -> None:
    _fence(stage)
    stage.engine.sessions.release(stage.store.dead)


def _forget_consumers(stage: Stage) -> None:
    _fence(stage)
    _until_nothing(lambda: stage.engine.queues.drop_consumers_part(stage.store.dead))


def _messages(stage: Stage) -> list[tuple[bytes, StoredMessage]]:
    """Marked, and to be stored as others: they are here already."""
    found = enumerate(stage.engine.transfer.dump("q", leased=True))
    return [(b"%d" % number, replace(each, message_id=b"")) for number, each in found]


def _restore(stage: Stage) -> None:
    messages, most = _messages(stage), transfer.MESSAGES_PER_TRANSACTION
    for start in range(0, len(messages), most):
        stage.engine.transfer.restore(b"import", messages[start : start + most])


def _import(stage: Stage) -> None:
    messages = _messages(stage)[:20]
    stage.engine.transfer.restore(b"import", messages)
    stage.engine.transfer.finish(b"import", {"messages": len(messages)})


def _clear_marks(stage: Stage) -> None:
    """Of an import that was finished by a process that died then."""
    stage.engine.transfer.restore(b"import", _messages(stage)[:20])
    stage.engine.transactions.write(lambda work: transfer.finish(work, b"import", {}))
    _by_cursor(stage.engine.transfer.forget_marks_part)


def _count_while_leased(stage: Stage) -> None:
    """A queue's first limits, while messages of it are held."""
    stage.engine.queues.limit("q", "busy", KeyLimits(max_in_flight=1))
    stage.engine.queues.limit("fair", "key0", None)
    stage.engine.queues.limit("target", "key", None)


def _change_limits(stage: Stage) -> None:
    """As a process leaves them that died then."""
    every_key = QueueControl(every_key=KeyLimits(rate=1, priority=2))
    stage.engine.transactions.write(lambda work: limit_changes.set_control(work, "fair", every_key))


def _follow_limits(stage: Stage) -> None:
    _change_limits(stage)
    _until_nothing(lambda: stage.engine.queues.follow_limits_part("fair"))


def _clear_orphans(stage: Stage) -> None:
    stage.engine.messages.ack(stage.store.leases)
    for (kind, name), value in stage.engine.upkeep.orphans().items():
        stage.engine.upkeep.clear_orphan(kind, name, value)


def _copies(stage: Stage) -> None:
    keys = stage.engine.keys
    for row in stage.engine.upkeep.rows(keys.all_copies):
        stage.engine.upkeep.clear_copy(row)


def _leased(stage: Stage) -> list[Lease]:
    return stage.store.leases


#: Those that commit nothing.
READS: dict[str, Verb] = {
    "publisher.check": lambda s: s.engine.publisher.check(_batch(s)[0]),
    "messages.reserve": lambda s: s.engine.messages.reserve(),
    "messages.arm": lambda s: s.engine.messages.arm(["q", "fair"], s.session),
    "messages.arm_empty": lambda s: s.engine.messages.arm_empty(["q", "fair"], s.session, {}),
    "messages.glance": lambda s: s.engine.messages.glance(s.session, [("shared", "tag")], []),
    "messages.has_work": lambda s: s.engine.messages.has_work(["q", "fair"]),
    "messages.look": lambda s: s.engine.messages.look(_first_demand(s)),
    "messages.holds": lambda s: s.engine.messages.holds(_leased(s)),
    "queues.being_deleted": lambda s: s.engine.queues.being_deleted(),
    "queues.last": lambda s: s.engine.queues.last("q"),
    "queues.expiring": lambda s: s.engine.queues.expiring(),
    "sessions.beats": lambda s: s.engine.sessions.beats(),
    "sessions.describe": lambda s: s.engine.sessions.describe([s.session, s.store.dead]),
    "sessions.neighbours": lambda s: s.engine.sessions.neighbours(s.session, 8),
    "sessions.skip_lease": lambda s: s.engine.sessions.skip_lease(s.store.dead, b""),
    "sessions.role_record": lambda s: s.engine.sessions.role_record("promoter"),
    "sessions.watch_alarm": lambda s: s.engine.sessions.watch_alarm(),
    "dead_letters.walk": lambda s: s.engine.dead_letters.walk("q.dead", reason="rejected"),
    "dead_letters.look": lambda s: s.engine.dead_letters.look(s.engine.dead_letters.walk("q.dead"), b"", 50),
    "dead_letters.queues": lambda s: s.engine.dead_letters.queues(),
    "inspect.totals": lambda s: s.engine.inspect.totals(),
    "inspect.key_totals": lambda s: s.engine.inspect.key_totals(),
    "inspect.samples": lambda s: s.engine.inspect.samples(SERIES["hour"]),
    "upkeep.due_queues": lambda s: _later(s).upkeep.due_queues(),
    "upkeep.relimited_queues": lambda s: s.engine.upkeep.relimited_queues(),
    "upkeep.limited_queues": lambda s: s.engine.upkeep.limited_queues(),
    "upkeep.ttl_queues": lambda s: s.engine.upkeep.ttl_queues(),
    "upkeep.expired_heads": lambda s: _later(s).upkeep.expired_heads(s.engine.upkeep.ttl_queues()),
    "upkeep.rows": lambda s: s.engine.upkeep.rows(s.keys.all_beats),
    "upkeep.orphans": lambda s: s.engine.upkeep.orphans(),
    "upkeep.asides": lambda s: s.engine.upkeep.asides(),
    "transfer.dump": _messages,
    "transfer.dedups": lambda s: list(s.engine.transfer.dedups()),
    "transfer.finished": lambda s: s.engine.transfer.finished(b"import"),
    "inspect.bindings": lambda s: s.engine.inspect.bindings(),
    "inspect.consumers": lambda s: s.engine.inspect.consumers("q"),
    "inspect.consumer_count": lambda s: s.engine.inspect.consumer_count("q"),
    "inspect.control": lambda s: s.engine.inspect.control("q"),
    "inspect.counts": lambda s: s.engine.inspect.counts("q"),
    "inspect.delayed": lambda s: s.engine.inspect.delayed("q", ALL),
    "inspect.exchange": lambda s: s.engine.inspect.exchange("x"),
    "inspect.exchanges": lambda s: s.engine.inspect.exchanges(),
    "inspect.exists": lambda s: s.engine.inspect.exists("q"),
    "inspect.facts": lambda s: s.engine.inspect.facts(list(s.engine.inspect.queues())),
    "inspect.find": lambda s: s.engine.inspect.find("q", b"\xff" * 16),
    "inspect.find_row": lambda s: s.engine.inspect.find_row("q", b"\xff" * 16),
    "inspect.find_task": lambda s: s.engine.inspect.find_task("ready"),
    "inspect.key_page": lambda s: s.engine.inspect.key_page("fair"),
    "inspect.keys_of": lambda s: s.engine.inspect.keys_of("fair"),
    "inspect.limits": lambda s: s.engine.inspect.limits("fair", "key0"),
    "inspect.list_task": lambda s: s.engine.inspect.list_task("ready"),
    "inspect.page": lambda s: [s.engine.inspect.page("q", View(state), 50) for state in ("ready", "delayed", "leased")],
    "inspect.peek": lambda s: [s.engine.inspect.peek(queue, 50) for queue in ("q", "fair")],
    "inspect.queue": lambda s: s.engine.inspect.queue("q"),
    "inspect.queues": lambda s: s.engine.inspect.queues(),
    "inspect.read_at": lambda s: [s.engine.inspect.read_at("q", *each[:2]) for each in _page(s)[:1]],
    "inspect.route": lambda s: s.engine.inspect.route("x", "k0"),
    "inspect.sessions": lambda s: s.engine.inspect.sessions(held=True),
    "inspect.snapshot": lambda s: s.engine.inspect.snapshot("fair", 50),
    "inspect.taken": lambda s: s.engine.inspect.taken("q"),
}
WRITES: dict[str, Verb] = {
    "publisher.publish": lambda s: s.engine.publisher.publish(_batch(s)),
    "publisher.publish_in": lambda s: s.engine.transactions.write(
        lambda work: s.engine.publisher.publish_in(work.tr, _batch(s))
    ),
    "publisher.atomically": _atomically,
    "publisher.bury_copy": lambda s: s.engine.publisher.bury_copy("q", Publication("", "q", LARGE)),
    "messages.claim": _claim,
    "messages.join": _join,
    "messages.serve": _serve,
    "messages.leave": lambda s: s.engine.messages.leave(_first_demand(s)),
    "messages.evict": _depose,
    "messages.ack": lambda s: s.engine.messages.ack(_leased(s)),
    "messages.release": lambda s: s.engine.messages.release(_leased(s)),
    "messages.reject": lambda s: s.engine.messages.reject(_leased(s)),
    "messages.delete": lambda s: s.engine.messages.delete("q", _page(s)[-1].message_id),
    "messages.delete_at": lambda s: s.engine.messages.delete_at("q", *_page(s)[0]),
    "messages.reschedule": lambda s: s.engine.messages.reschedule("q", _page(s)[0], 0, payload=b"other"),
    "messages.cancel": lambda s: [s.engine.messages.cancel(task_id) for task_id in ("ready", "delayed", "dead")],
    "messages.move": lambda s: [s.engine.messages.move(queue, "target") for queue in ("q", "fair")],
    "messages.move_some": lambda s: _by_cursor(
        lambda mark: s.engine.messages.move_some("q", "target", mark or s.engine.queues.last("q"))[1]
    ),
    "queues.declare": _declare_again,
    "queues.delete": lambda s: [s.engine.queues.delete(queue) for queue in ("q", "fair", "full", "shared")],
    "queues.finish_deletion": _finish_deletion,
    "queues.finish_deletion_part": _finish_deletion_parts,
    "queues.purge": lambda s: [s.engine.queues.purge(queue) for queue in ("q", "fair")],
    "queues.purge_some": _purge_in_parts,
    "queues.expire": _expire,
    "queues.touch": lambda s: s.engine.queues.touch("expires"),
    "queues.got_from": lambda s: s.engine.queues.got_from("expires"),
    "queues.add_consumer": _in_turn(
        lambda s: s.engine.queues.add_consumer(s.session, "shared", "another"),
        lambda s: s.engine.queues.add_consumer(s.session, "q", "another", declared=True),
    ),
    "queues.remove_consumer": _in_turn(
        lambda s: s.engine.queues.remove_consumer(s.store.dead, "own0", "tag"),
        lambda s: s.engine.queues.remove_consumer(s.store.dead, "shared", "tag0"),
    ),
    "queues.drop_consumers_part": _forget_consumers,
    "queues.leave": _in_turn(
        lambda s: s.engine.queues.leave(s.session, ["tag"]), lambda s: s.engine.queues.leave(s.store.dead, ["tag"])
    ),
    "queues.set_control": lambda s: s.engine.queues.set_control("fair", QueueControl(every_key=KeyLimits(rate=1))),
    "queues.reset_control": lambda s: s.engine.queues.reset_control("fair"),
    "queues.change_control": lambda s: s.engine.queues.change_control("q", every_key={"paused": True}),
    "queues.limit": _count_while_leased,
    "queues.change_limits": lambda s: s.engine.queues.change_limits("fair", "key0", paused=True, priority=3),
    "queues.follow_limits": _in_turn(_change_limits, lambda s: s.engine.queues.follow_limits("fair")),
    "queues.follow_limits_part": _follow_limits,
    "queues.declare_exchange": lambda s: s.engine.queues.declare_exchange(Exchange("y")),
    "queues.delete_exchange": lambda s: s.engine.queues.delete_exchange("x"),
    "queues.bind": _in_turn(*[lambda s: s.engine.queues.bind("target", "x", "other")] * 2),
    "queues.unbind": lambda s: s.engine.queues.unbind("q", "x", "k0"),
    "sessions.open": lambda s: s.engine.sessions.open({}),
    "sessions.beat": lambda s: s.engine.sessions.beat(s.session, consumed=["q"]),
    "sessions.beats_of_a_writer": lambda s: s.engine.sessions.beats_of_a_writer(),
    "sessions.recover": lambda s: s.engine.sessions.recover(s.session, _leased(s)[0].number),
    "sessions.close": lambda s: s.engine.sessions.close(s.session),
    "sessions.fence": _fence,
    "sessions.release": _release_session,
    "sessions.release_part": _end_session,
    "sessions.forget_part": _end_session,
    "sessions.hold_role": lambda s: s.engine.sessions.hold_role("promoter", s.session, None),
    "sessions.leave_role": _in_turn(
        lambda s: s.engine.sessions.hold_role("promoter", s.session, None),
        lambda s: s.engine.sessions.leave_role("promoter", s.session),
    ),
    "dead_letters.replay_part": lambda s: _walk(
        s, lambda walk, cursor: s.engine.dead_letters.replay_part(walk, cursor, ALL, to="target")
    ),
    "dead_letters.replay_at": lambda s: s.engine.dead_letters.replay_at("q.dead", *_page(s, queue="q.dead")[0][1:]),
    "dead_letters.discard_part": lambda s: _walk(
        s, lambda walk, cursor: s.engine.dead_letters.discard_part(walk, cursor, ALL)
    ),
    "dead_letters.trim_part": _in_turn(
        _much_later, lambda s: _until_nothing(lambda: s.engine.dead_letters.trim_part("q.dead"))
    ),
    "upkeep.flush_totals": _in_turn(
        lambda s: s.engine.messages.ack(_leased(s)), lambda s: s.engine.upkeep.flush_totals()
    ),
    "upkeep.sample": lambda s: s.engine.upkeep.sample([SERIES["hour"]]),
    "upkeep.trim_totals": lambda s: [*s.engine.upkeep.trim_totals()],
    "upkeep.promote_part": lambda s: _until_nothing(lambda: _later(s).upkeep.promote_part("q")[0]),
    "upkeep.unpark": _in_turn(_claim, lambda s: _later(s).upkeep.unpark()),
    "upkeep.regain_part": lambda s: s.engine.upkeep.regain_part(),
    "upkeep.trim_full_part": lambda s: _until_nothing(lambda: s.engine.upkeep.trim_full_part("full")),
    "upkeep.drop_expired_part": lambda s: _by_cursor(
        lambda cursor: _later(s).upkeep.drop_expired_part("ttl", cursor)[1]
    ),
    "upkeep.clear_dedup_part": lambda s: _until_nothing(lambda: _later(s).upkeep.clear_dedup_part(kept_ms=0)),
    "upkeep.clear_buckets_part": _in_turn(_claim, lambda s: _by_cursor(_later(s).upkeep.clear_buckets_part)),
    "upkeep.clear_rows": lambda s: s.engine.upkeep.clear_rows(s.engine.upkeep.rows(s.keys.all_asides)),
    "upkeep.clear_copy": _copies,
    "upkeep.clear_orphan": _clear_orphans,
    "upkeep.set_aside": lambda s: s.engine.upkeep.set_aside(Aside("another", "subject", "error", 1, 0)),
    "upkeep.forget_aside": lambda s: s.engine.upkeep.forget_aside("duty", "subject"),
    "transfer.restore": _restore,
    "transfer.restore_dedups": lambda s: s.engine.transfer.restore_dedups(
        [("", "q", f"other{number}", s.clock.wall_ms() + 10) for number in range(s.sizes.messages)]
    ),
    "transfer.bind": lambda s: s.engine.transfer.bind("target", "x", "other"),
    "transfer.finish": _import,
    "transfer.forget_marks_part": _clear_marks,
}
VERBS = READS | WRITES
