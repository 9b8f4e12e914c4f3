"""What a consumer process does by itself: messages, its session, its duties, its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kit.duties import promote_all
from kit.faults import Interrupted
from kit.simulation.ledgers.rights import Once
from kit.simulation.ledgers.rows import label_of
from kit.simulation.process import Frame, Killed, Process
from kit.simulation.violation import Violation
from kit.simulation.world import BEAT_INTERVAL_S, SESSION_TTL_S, World
from kombu_fdb.errors import CapacityExceeded, CommitUnknown, SessionLost, StoreError
from kombu_fdb.model import Lease, Publication, SessionId

#: How long a consumer waits for its watches before it looks by itself.
POLL_S = 12.0


# -- messages ----------------------------------------------------------------------------------------------------------


def publish(world: World, frame: Frame) -> None:
    """One message or a batch, to the default exchange."""
    process = frame.actor
    batch = [_message(world, frame, number) for number in range(frame.rng.choice(world.profile.batches))]
    names = {label_of(each.payload) for each in batch}
    world.note(f"{process.name} publishes {', '.join(sorted(names))} to {sorted({p.routing_key for p in batch})}")
    judge = world.ledger.judge
    try:
        process.engine.publisher.publish(batch)
    except CommitUnknown:
        raise
    except (StoreError, CapacityExceeded):
        judge.refused |= names
        if names & judge.arrived:
            raise Violation("DURABLE", f"{names & judge.arrived} are stored, and the publish failed") from None
        raise
    if not world.profile.bounded(batch[0].routing_key) and not names <= judge.arrived:
        raise Violation("DURABLE", f"{names - judge.arrived} are not stored, and the publish returned")


def _message(world: World, frame: Frame, number: int) -> Publication:
    rng, profile = frame.rng, world.profile
    now_ms = frame.actor.clock.wall_ms()
    name = f"m{frame.step.number}-{number}"
    queues = [queue for queue in profile.queues if queue not in ("graves", "cellar")]
    queue = rng.choice(queues)
    due_ms = now_ms + rng.choice([1_000, 5_000, 60_000]) if rng.random() < profile.delayed else 0
    ttl_ms = rng.choice([5_000, 20_000]) if rng.random() < profile.expiring else None
    payload = f"{name}|".encode() + b"." * (3000 if rng.random() < profile.large else 0)
    key = rng.choice(profile.keys) if queue.startswith("fair") else ""
    priority = 5 if rng.random() < profile.urgent else 0
    ends = [each for each in (ttl_ms, profile.queues[queue].get("x-message-ttl")) if each is not None]
    if ends:
        world.ledger.judge.lives[name] = min(ends)
    world.ledger.judge.due[name] = due_ms
    return Publication("", queue, payload, priority, due_ms, ttl_ms, key=key, task_id=name)


def insist(world: World, frame: Frame) -> None:
    """One message, published until that is confirmed, as Celery does: it is stored once."""
    process, frame.verb = frame.actor, "publish"
    message = _message(world, frame, 0)
    name = label_of(message.payload)
    world.note(f"{process.name} insists on {name}")
    for pause_s in frame.rng.choices([0.0, 0.5, 2.0, 4.0], k=4):
        try:
            process.engine.publisher.publish([message])
        except (StoreError, Interrupted):
            world.pass_time(pause_s)
            continue
        if name not in world.ledger.judge.arrived:
            raise Violation("DURABLE", f"{name} is not stored, and the publish returned")
        return


def repeat(world: World, frame: Frame) -> None:
    """A message with a dedup id, published again and again as by one who can't know whether it is stored."""
    process, judge = frame.actor, world.ledger.judge
    message = _message(world, frame, 0)._replace(
        dedup_id=frame.rng.choice("xy"), dedup_window_ms=frame.rng.choice([3_000, 15_000])
    )
    once = judge.once[label_of(message.payload)] = Once(message.routing_key, message.dedup_id, message.dedup_window_ms)
    frame.began_ms = process.clock.wall_ms()  # a commit of the first attempt may land late
    window = judge.window(once)
    for _ in range(frame.rng.choice([1, 2, 4])):
        try:
            process.engine.publisher.publish([message])
        except StoreError:
            continue
        if not judge.was_stored(once):
            raise Violation("DURABLE", f"{message.payload[:20]!r} is no duplicate, and is not stored")
        if window is not None and window[1] <= frame.earliest_ms and judge.window(once) == window:
            raise Violation(
                "SKEW", f"the window of {once.dedup_id} is over, and {message.payload[:20]!r} is not stored"
            )
    world.note(f"{process.name} published {label_of(message.payload)} as {message.dedup_id} to {message.routing_key}")


def claim(world: World, frame: Frame) -> None:
    """Take messages, with pending acks in the same transaction now and then. A waiting consumer sleeps on."""
    process, rng = frame.actor, frame.rng
    if not process.woken and world.clock.monotonic() < process.waits_until:
        return
    process.stop_waiting()
    queues = rng.sample([*world.profile.queues], min(2, len(world.profile.queues)))
    if rng.random() < 0.15:
        queues = [f"{queue}.dead" for queue in queues]
    acks = list(process.held)[: rng.choice([0, 0, 2])]
    take(world, frame, queues, rng.choice([1, 2, 5]), acks)


def take(world: World, frame: Frame, queues: list[str], limit: int, acks: list[Lease]) -> int:
    """One claim and what it means for the process; returns how many messages came."""
    process = frame.actor
    session = process.session
    frame.no_ack = world.profile.no_ack > 0 and frame.rng.random() < world.profile.no_ack
    no_ack = queues if frame.no_ack else ()
    try:
        taken = process.client_session.claim(
            queues, limit, acks=acks, consumers=consumers_of(world, process, queues), no_ack=no_ack
        )
    except SessionLost:
        lose_session(world, process, session)
        return 0
    except (CommitUnknown, Interrupted):
        _forget(process, acks)
        process.unsettled.append(("ack", acks))
        raise
    _forget(process, acks)
    for delivery in taken:
        world.note(f"{process.name} takes {label_of(delivery.payload)} of {delivery.queue}")
        if frame.no_ack:
            world.ledger.judge.handed_out(delivery.message_id, label_of(delivery.payload))
        else:
            process.held[delivery.lease] = delivery
    return len(taken)


def settle_again(frame: Frame) -> None:
    """What the process has settled without an answer: acks again, anything else goes back."""
    process, verb = frame.actor, frame.verb
    while process.unsettled:
        frame.verb, leases = process.unsettled[0]
        if frame.verb == "ack":
            process.engine.messages.ack(leases)
        else:
            process.engine.messages.release(leases, counted=False)
        process.unsettled.pop(0)
    frame.verb = verb


def ack(world: World, frame: Frame) -> None:
    _settle(world, frame, frame.actor.engine.messages.ack)


def reject(world: World, frame: Frame) -> None:
    _settle(world, frame, frame.actor.engine.messages.reject)


def release(world: World, frame: Frame) -> None:
    """Back to their places or, delayed, later; counted as delivered or not."""
    process, rng = frame.actor, frame.rng
    frame.counted = rng.random() < 0.6
    due_ms = rng.choice([0, 0, process.clock.wall_ms() + 3_000])
    _settle(world, frame, lambda leases: process.engine.messages.release(leases, counted=frame.counted, due_ms=due_ms))


def _settle(world: World, frame: Frame, verb: Callable[[list[Lease]], list[bool]]) -> None:
    process = frame.actor
    leases = frame.rng.sample(list(process.held), min(len(process.held), frame.rng.choice([1, 1, 3])))
    if not leases:
        return
    names = [label_of(process.held[lease].payload) for lease in leases]
    _forget(process, leases)
    here = [world.ledger.keys.lease(*lease) in world.ledger.rows for lease in leases]
    try:
        done = verb(leases)
    except (StoreError, Interrupted):
        process.unsettled.append(("ack" if frame.verb == "ack" else "recover", leases))
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
    process = frame.actor
    process.stop_waiting()
    queues = [*world.profile.queues]
    watches = process.engine.messages.arm(queues, process.session, consumers_of(world, process, queues))
    if watches is None:
        return
    process.watches, process.woken = watches, False
    process.waits_until = world.clock.monotonic() + POLL_S
    for watch in watches:
        watch.on_fire(process.wake)
    world.note(f"{process.name} waits")


# -- sessions and duties -----------------------------------------------------------------------------------------------


def beat(world: World, frame: Frame) -> None:
    process = frame.actor
    session = process.session
    alive = process.duties.beat(process.client_session, SESSION_TTL_S)
    process.last_beat = world.clock.monotonic()
    if not alive:
        lose_session(world, process, session)


def lose_session(world: World, process: Process, session: SessionId) -> None:
    """It was fenced: begin another, as a new consumer."""
    if process.session != session:
        return  # another thread was faster
    world.note(f"{process.name} learns that it was fenced")
    if process.connection is not None:
        process.client_session.lose()  # its receiver begins another
        return
    process.held.clear()
    process.begin(world.open_client_session(process.engine), world.duties, world.clock.monotonic())


def duties(world: World, frame: Frame) -> None:
    """Sweep, promote, expire, trim: what is due of it."""
    process, session = frame.actor, frame.actor.session
    if process.deferred is not None:
        _serve(process, process.deferred)
        return
    try:
        process.client_session.watch_claims()
    except SessionLost:
        lose_session(world, process, session)
    settle_again(frame)
    if frame.rng.random() < 0.3:
        process.duties.sweep()
    process.pause_s = process.duties.run_once()
    world.note(f"{process.name} did its duties")


def _serve(process: Process, deferred: Callable[[], None]) -> None:
    """As its thread does, which ends with a session that is lost."""
    session, duties = process.client_session, process.duties
    process.pause_s = BEAT_INTERVAL_S if session.lost else duties.serve(session, deferred, rang=True)


def sweep(world: World, frame: Frame) -> None:
    """A second sweeper: bring back what ended sessions hold, whichever process they belonged to."""
    process = frame.actor
    ended = [session for session in world.ledger.beats if session not in world.ledger.sessions]
    if ended:
        process.engine.sessions.release(frame.rng.choice(ended[-3:]))


def promote(_world: World, frame: Frame) -> None:
    """A second promoter, that believes to hold the role."""
    promote_all(frame.actor.engine)


def start(_world: World, _frame: Frame) -> None:
    """The slot is filled by now."""


def die(_world: World, _frame: Frame) -> None:
    raise Killed


# -- consumers ---------------------------------------------------------------------------------------------------------


def consume(world: World, frame: Frame) -> None:
    """Declare a queue that can vanish, and keep it alive."""
    process = frame.actor
    queue = frame.rng.choice([queue for queue, given in world.profile.queues.items() if "x-expires" in given])
    declaration = world.declaration(queue)
    process.engine.queues.declare(declaration)
    process.engine.queues.add_consumer(process.session, queue, "tag")
    world.note(f"{process.name} consumes from {queue}")


def leave(world: World, frame: Frame) -> None:
    process = frame.actor
    queue = frame.rng.choice([queue for queue, given in world.profile.queues.items() if "x-expires" in given])
    process.engine.queues.remove_consumer(process.session, queue, "tag")


def resign(world: World, frame: Frame) -> None:
    """Cease to be the consumer of a queue that serves one at a time."""
    process = frame.actor
    for queue, tag in sorted(consumers_of(world, process, world.profile.queues).items()):
        world.note(f"{process.name} resigns from {queue}")
        process.client_session.end_consumers([tag])
        process.engine.queues.remove_consumer(process.session, queue, tag)


def consumers_of(world: World, process: Process, queues: Iterable[str]) -> dict[str, str]:
    """The process's tags in those of the queues that serve one consumer at a time."""
    return {queue: process.name for queue in queues if world.profile.single_active(queue)}


def tidy(world: World, frame: Frame) -> None:
    """Forget dedup ids whose window is over, as by a clock that is as far ahead as it may be."""
    own_ms = 2000 * world.profile.most_off_s if "jump" in world.profile.weights else 0
    while frame.actor.engine.upkeep.clear_dedup_part(kept_ms=own_ms):
        pass
