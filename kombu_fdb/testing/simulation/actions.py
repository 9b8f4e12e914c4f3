"""What a step can do. An action is named in a profile; ``thread`` says which thread of a process does it.

A new verb of the engine is one function here, a line in :data:`ACTIONS`, a weight in a profile, and its rights in
``rights.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from kombu_fdb.errors import CapacityExceeded, CommitUnknown, LeaseLost, StoreError
from kombu_fdb.keyspace.codec import AMOUNT_BYTES, encode_amount
from kombu_fdb.keyspace.layout import Keyspace
from kombu_fdb.model import KeyLimits, Lease, Publication, QueueControl
from kombu_fdb.testing.faults import Fault
from kombu_fdb.testing.simulation import rest
from kombu_fdb.testing.simulation.plan import Step
from kombu_fdb.testing.simulation.process import Frame, Killed, Process, Violation
from kombu_fdb.testing.simulation.rows import label_of
from kombu_fdb.testing.simulation.world import (
    SESSION_TTL_S,
    Action,
    World,
)

__all__ = ["ACTIONS"]

#: How long a consumer waits for its watches before it looks by itself.
POLL_S = 12.0


def _process(frame: Frame) -> Process:
    assert frame.process is not None
    return frame.process


# -- messages ----------------------------------------------------------------------------------------------------------


def publish(world: World, frame: Frame) -> None:
    """One message or a batch, to the default exchange."""
    process = _process(frame)
    batch = [_message(world, frame, number) for number in range(frame.rng.choice([1, 1, 1, 3]))]
    names = {label_of(each.payload) for each in batch}
    world.note(f"{process.name} publishes {', '.join(sorted(names))} to {sorted({p.routing_key for p in batch})}")
    judge = world.ledger.judge
    try:
        process.engine.publish(batch)
    except CommitUnknown:
        raise
    except (StoreError, CapacityExceeded):
        judge.refused |= names
        if names & judge.arrived:
            raise Violation("DURABLE", f"{names & judge.arrived} are stored, and the publish failed") from None
        raise
    overfull = "x-max-length" in world.profile.queues.get(batch[0].routing_key, {})
    if not overfull and not names <= judge.arrived:
        raise Violation("DURABLE", f"{names - judge.arrived} are not stored, and the publish returned")


def _message(world: World, frame: Frame, number: int) -> Publication:
    rng, profile = frame.rng, world.profile
    now_ms = _process(frame).clock.wall_ms()
    name = f"m{frame.step.number}-{number}"
    queues = [queue for queue in profile.queues if queue not in ("graves", "cellar")]
    queue = rng.choice(queues)
    due_ms = now_ms + rng.choice([1_000, 5_000, 60_000]) if rng.random() < profile.delayed else 0
    ttl_ms = rng.choice([5_000, 20_000]) if rng.random() < profile.expiring else None
    payload = f"{name}|".encode() + b"." * (3000 if rng.random() < profile.large else 0)
    key = rng.choice(profile.keys) if queue.startswith("fair") else ""
    priority = 5 if rng.random() < profile.urgent else 0
    world.ledger.judge.due[name] = due_ms
    return Publication("", queue, payload, priority, due_ms, ttl_ms, key=key)


def claim(world: World, frame: Frame) -> None:
    """Take messages, with pending acks in the same transaction now and then. A waiting consumer sleeps on."""
    process, rng = _process(frame), frame.rng
    if not process.woken and world.clock.monotonic() < process.waits_until:
        return
    process.stop_waiting()
    recover(frame)
    queues = rng.sample([*world.profile.queues], min(2, len(world.profile.queues)))
    if rng.random() < 0.15:
        queues = [f"{queue}.dead" for queue in queues]
    acks = list(process.held)[: rng.choice([0, 0, 2])]
    take(world, frame, queues, rng.choice([1, 2, 5]), acks)


def take(world: World, frame: Frame, queues: list[str], limit: int, acks: list[Lease]) -> int:
    """One claim and what it means for the process; returns how many messages came."""
    process = _process(frame)
    session = process.session
    contention = process.engine._contention_of(queues)
    contention._rivals = max(contention._rivals, world.profile.rivalry)
    try:
        taken = process.engine.claim(session, queues, limit, acks=acks)
    except LeaseLost:
        lose_session(world, process, session)
        return 0
    except CommitUnknown:
        process.in_doubt = True
        _forget(process, acks)
        raise
    _forget(process, acks)
    for delivery in taken:
        world.note(f"{process.name} takes {label_of(delivery.payload)} of {delivery.queue}")
        process.held[delivery.lease] = delivery
    return len(taken)


def recover(frame: Frame) -> None:
    """Before the next claim: hand back what came with a lost answer."""
    process = _process(frame)
    if process.in_doubt:
        frame.verb = "recover"
        process.engine.recover(process.session, set(process.held))
        process.in_doubt, frame.verb = False, frame.step.action


def ack(world: World, frame: Frame) -> None:
    _settle(world, frame, _process(frame).engine.ack)


def reject(world: World, frame: Frame) -> None:
    _settle(world, frame, _process(frame).engine.reject)


def release(world: World, frame: Frame) -> None:
    """Back to their places or, delayed, later; counted as delivered or not."""
    process, rng = _process(frame), frame.rng
    frame.counted = rng.random() < 0.6
    due_ms = rng.choice([0, 0, process.clock.wall_ms() + 3_000])
    _settle(world, frame, lambda leases: process.engine.release(leases, counted=frame.counted, due_ms=due_ms))


def _settle(world: World, frame: Frame, verb: Callable[[list[Lease]], list[bool]]) -> None:
    process = _process(frame)
    leases = frame.rng.sample(list(process.held), min(len(process.held), frame.rng.choice([1, 1, 3])))
    if not leases:
        return
    names = [label_of(process.held[lease].payload) for lease in leases]
    _forget(process, leases)  # whatever comes of it: if the answer is lost, the sweep or the commit has them
    here = [world.ledger.keys.lease(*lease) in world.ledger.rows for lease in leases]
    try:
        done = verb(leases)
    except StoreError:
        process.in_doubt = True
        raise
    world.note(f"{process.name}: {frame.verb} of {names} is {done}")
    still = [world.ledger.keys.lease(*lease) in world.ledger.rows for lease in leases]
    if any(ok and not before for ok, before in zip(done, here, strict=True)) or any(still):
        raise Violation("ONE-OWNER", f"{frame.verb} of {names} returned {done}")


def _forget(process: Process, leases: list[Lease]) -> None:
    for lease in leases:
        process.held.pop(lease, None)


def wait(world: World, frame: Frame) -> None:
    """Watch the bells, and sleep until one rings; after a while look anyway."""
    process = _process(frame)
    process.stop_waiting()
    watches = process.engine.arm([*world.profile.queues])
    if watches is None:
        return
    process.watches, process.woken = watches, False
    process.waits_until = world.clock.monotonic() + POLL_S
    for watch in watches:
        watch.on_fire(process.wake)
    world.note(f"{process.name} waits")


# -- sessions and duties -----------------------------------------------------------------------------------------------


def beat(world: World, frame: Frame) -> None:
    process = _process(frame)
    session = process.session
    alive = process.engine.beat(session, ttl_s=SESSION_TTL_S)
    process.last_beat = world.clock.monotonic()
    if not alive:
        lose_session(world, process, session)


def lose_session(world: World, process: Process, session: bytes) -> None:
    """It was fenced: begin another, as a new consumer."""
    if process.session != session:
        return  # another thread was faster
    world.note(f"{process.name} learns that it was fenced")
    process.session = world.open_session(process.engine)
    process.sessions.add(process.session)
    process.held.clear()
    process.duties = world.duties(process.engine, process.clock, process.session)
    process.last_beat = world.clock.monotonic()
    process.in_doubt = False


def duties(world: World, frame: Frame) -> None:
    """Sweep, promote, expire, trim: what is due of it."""
    process = _process(frame)
    if frame.rng.random() < 0.3:
        process.duties.sweep()
    process.duties.run_once()
    world.note(f"{process.name} did its duties")


def sweep(world: World, frame: Frame) -> None:
    """A second sweeper: bring back what anybody's ended session holds."""
    process = _process(frame)
    ended = [session for session in world.ledger.beats if session not in world.ledger.sessions]
    if ended:
        process.engine.release_session(frame.rng.choice(ended[-3:]))


def promote(_world: World, frame: Frame) -> None:
    """A second promoter, that believes to hold the role."""
    _process(frame).engine.promote()


def start(_world: World, _frame: Frame) -> None:
    """The slot is filled by now."""


def die(_world: World, _frame: Frame) -> None:
    raise Killed


def close(world: World, frame: Frame) -> None:
    """End in good order; the slot is free when all is handed back."""
    process = _process(frame)
    session = process.session
    process.duties.stop()
    world.note(f"{process.name} closes")
    process.engine.close_session(session)
    if process.busy == {"close"} and process in world.processes.values():
        world.kill(process)


def freeze(world: World, frame: Frame) -> None:
    """SIGSTOP, a suspended laptop: no thread of it does anything for a while."""
    seconds = frame.rng.choice([10, 35, 60])
    _process(frame).asleep_until = world.clock.monotonic() + seconds
    world.note(f"{_process(frame).name} freezes for {seconds} s")


def wake(world: World, _frame: Frame) -> None:
    """SIGCONT, or the network is back: whoever was away beats at once."""
    for slot, process in sorted(world.processes.items()):
        if process.link.cut or process.asleep_until > world.clock.monotonic():
            process.asleep_until, process.link.cut = 0.0, False
            world.note(f"{process.name} wakes")
            world.perform_as(slot, "beat")


def cut(world: World, frame: Frame) -> None:
    """The network between one process and the store."""
    process = _process(frame)
    seconds = frame.rng.choice([10, 35, 60])
    process.link.cut, process.cut_until = True, world.clock.monotonic() + seconds
    world.note(f"{process.name} is cut off for {seconds} s")


def jump(world: World, frame: Frame) -> None:
    """One machine's wall clock is set."""
    seconds = frame.rng.choice([-300, -30, 30, 300])
    process = _process(frame)
    process.clock.offset_ms = max(-600_000, min(600_000, process.clock.offset_ms + seconds * 1000))
    world.note(f"the wall clock of {process.name} jumps by {seconds} s")


# -- operators ---------------------------------------------------------------------------------------------------------


def limit(world: World, frame: Frame) -> None:
    """Pause a key, limit it, or set it free."""
    key, rng = frame.rng.choice([*world.profile.keys]), frame.rng
    queue = rng.choice([queue for queue in world.profile.queues if queue.startswith("fair")])
    limits = rng.choice(
        [
            None,
            None,
            KeyLimits(paused=True),
            KeyLimits(max_in_flight=1),
            KeyLimits(max_in_flight=2, weight=3),
            KeyLimits(rate=0.5, burst=2),
            KeyLimits(priority=7),
        ]
    )
    world.note(f"limits of {key!r} in {queue}: {limits}")
    _process(frame).engine.limit(queue, key, limits)


def pause(world: World, frame: Frame) -> None:
    """Pause or resume a queue, limit every key, let newcomers in sooner."""
    queue = frame.rng.choice([*world.profile.queues])
    every_key = KeyLimits(max_in_flight=2) if queue.startswith("fair") and frame.rng.random() < 0.3 else KeyLimits()
    newcomer = frame.rng.choice(["next", "next", "current", "first"])
    control = QueueControl(paused=frame.rng.random() < 0.3, newcomer=newcomer, every_key=every_key)
    world.note(f"control of {queue}: {control}")
    _process(frame).engine.set_control(queue, control)


def purge(world: World, frame: Frame) -> None:
    queue = frame.rng.choice([*world.profile.queues])
    world.note(f"purge {queue}: {_process(frame).engine.purge(queue)}")


def delete(world: World, frame: Frame) -> None:
    """One message, wherever it is."""
    rows = sorted({(row.queue, row.record.message_id) for row in world.ledger.rows.values() if not row.malformed})
    if rows:
        queue, message_id = frame.rng.choice(rows)
        world.note(f"delete {message_id.hex()[:6]} of {queue}")
        _process(frame).engine.delete(queue, message_id)


def replay(world: World, frame: Frame) -> None:
    """Bring dead letters back."""
    queue = frame.rng.choice([*world.profile.queues])
    world.note(f"replay {queue}: {_process(frame).engine.replay(queue, frame.rng.choice([1, 3]))}")


def garble(world: World, frame: Frame) -> None:
    """Bytes in the ready range that no version of ours has written."""
    queue, value = frame.rng.choice([*world.profile.queues]), frame.rng.randbytes(12)
    world.note(f"malformed bytes in {queue}")
    keys: Keyspace = world.ledger.keys
    tr = _process(frame).link.begin(timeout_s=1.0)
    try:
        tr.set_versionstamped_key(keys.ready_prefix(queue, 0), b"\0\0", value)
        tr.add(keys.count(queue, "ready"), encode_amount(1, len(value)), width=AMOUNT_BYTES)
        tr.set_versionstamped_value(keys.bell(queue))
        tr.commit()
    finally:
        tr.cancel()


def consume(world: World, frame: Frame) -> None:
    """Declare a queue that can vanish, and keep it alive."""
    process = _process(frame)
    queue = frame.rng.choice([queue for queue, given in world.profile.queues.items() if "x-expires" in given])
    declaration = world.declaration(queue)
    process.engine.declare_queue(declaration)
    process.engine.add_consumer(process.session, queue, "tag")
    world.note(f"{process.name} consumes from {queue}")


def leave(world: World, frame: Frame) -> None:
    process = _process(frame)
    queue = frame.rng.choice([queue for queue, given in world.profile.queues.items() if "x-expires" in given])
    process.engine.remove_consumer(process.session, queue, "tag")


def drop(world: World, frame: Frame) -> None:
    """Delete a queue and declare it anew."""
    queue = frame.rng.choice([*world.profile.queues])
    world.note(f"drop {queue}: {_process(frame).engine.delete_queue(queue)}")
    _process(frame).engine.declare_queue(world.declaration(queue))


# -- the world ---------------------------------------------------------------------------------------------------------


def pass_(world: World, frame: Frame) -> None:
    world.pass_time(frame.rng.choice([0.1, 2.0, 5.0]))


def tick(world: World, frame: Frame) -> None:
    """Time passes and every process does its duties; in those of one, others act."""
    world.pass_time(5.0)
    chosen = frame.rng.choice([None, *sorted(world.processes)])
    for slot in sorted(world.processes):
        meanwhile = frame.step.meanwhile if slot == chosen else ()
        world.perform(Step(f"{frame.step.number}t", "duties", slot, frame.step.seed, (), meanwhile, frame.step.at))


def outage(world: World, frame: Frame) -> None:
    """The store works for nobody for longer than a session lives; then all come back, in any order."""
    if world.faults.outage:
        return
    world.faults.outage = frame.rng.choice([Fault.UNAVAILABLE, Fault.UNAVAILABLE, Fault.TOO_OLD])
    world.note(f"from now on: {world.faults.outage.value}")
    began = world.clock.monotonic()
    for _ in range(frame.rng.choice([2, 8, 10])):
        world.clock.advance(5.0)
        world.beat_all()
    world.faults.outage = None
    # Between the looks before and after it, a quarter of a session's life counts (``sweep.Observer``).
    world.hidden_s += max(0.0, world.clock.monotonic() - began - SESSION_TTL_S / 4)
    for slot in frame.rng.sample(sorted(world.processes), len(world.processes)):
        world.perform_as(slot, frame.rng.choice(["duties", "beat"]))
    world.beat_all()


def recovery(world: World, _frame: Frame) -> None:
    """The cluster recovers: versions jump, open transactions are too old, watches fire."""
    world.note("the cluster recovers")
    world.database.recover()


def calm(world: World, _frame: Frame) -> None:
    if len(world.frames) == 1:
        rest.calm(world)


#: Name -> (thread, what it does); the world's own actions have no thread.
ACTIONS: dict[str, tuple[str, Action]] = {
    **{each.__name__: ("main", each) for each in (publish, claim, ack, reject, release, wait, start, die)},
    **{each.__name__: ("main", each) for each in (limit, pause, purge, delete, replay, garble, consume, leave, drop)},
    **{each.__name__: ("duties", each) for each in (duties, sweep, promote)},
    **{each.__name__: ("world", each) for each in (freeze, cut, jump)},
    "beat": ("beat", beat),
    "close": ("close", close),
    "pass": ("", pass_),
    **{each.__name__: ("", each) for each in (wake, tick, outage, recovery, calm)},
}
