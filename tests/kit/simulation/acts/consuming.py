"""What a process does whose messages come through the transport: its receiver's turns, its drains, its settlements."""

from __future__ import annotations

from dataclasses import replace

from kit.simulation.connection import SimulatedClient, SimulatedTransport
from kit.simulation.ledgers.rows import label_of
from kit.simulation.process import Dice, Frame, Process
from kit.simulation.violation import Violation
from kit.simulation.world import OPTIONS, World
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.model import Delivery
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.transport.consuming.receiver import deliver_next

#: Seconds to the safety look, which would find what a lost wake-up has left: longer than most runs.
NEVER_S = 3_600.0
#: Drained seldom, and never.
UNDRAINED_S = (5.0, NEVER_S)
#: Pauses of a receiver that are a part of its work; longer ones are sleep, as of the one behind the first of a wait
#: queue.
NAP_S = 0.45
MOST_TURNS = 400


def connect(world: World, process: Process) -> SimulatedTransport:
    """A connection of this process, which consumes from every queue."""
    rng = world.frames[-1].rng
    options = replace(OPTIONS, poll_interval=NEVER_S, undrained_timeout=rng.choice(UNDRAINED_S), claim_window=4)

    def join() -> ClientSession:
        if process.client_session.lost:
            world.note(f"{process.name} opens another session")
            process.begin(world.open_client_session(process.engine), world.duties, world.clock.monotonic())
        return process.client_session

    client = SimulatedClient(process.engine, options, join)
    prefetch, single_active = rng.choice([1, 2, 3, 5]), world.profile.single_active
    transport = SimulatedTransport(
        client, world.clock.monotonic, Dice(world.frames), prefetch, process.clock.wall_ms, single_active
    )
    process.deferred = client.keep_house
    transport.on_given = lambda delivery: _given(world, process, transport, delivery)
    transport.fetcher.attend_loop(registered=rng.random() < 0.7)
    for number, queue in enumerate(world.profile.queues):
        transport.consume(queue, f"{process.name}-{number}")
    claiming = transport.fetcher._claiming
    if world.profile.contested:
        claiming.combiner.contention.contest(world.profile.queues)
    elif rng.random() < 0.7:
        claiming._began = True  # it has stood in the wait queue before, and was alone
    return transport


def turn(world: World, frame: Frame) -> None:
    """The receiver's thread: one turn, if it does not sleep."""
    process, transport = frame.actor, _connection(frame)
    if transport.is_awake:
        try:
            transport.turn()
        finally:
            check_credit(process, transport)
        check_awake(process, transport)


def drain(world: World, frame: Frame) -> None:
    """The worker's loop hands out what has arrived."""
    transport = _connection(frame)
    with transport.draining():
        for _ in range(frame.rng.choice([1, 3])):
            if not _deliver(world, frame.actor, transport):
                break
    check_credit(frame.actor, transport)


def finish(world: World, frame: Frame) -> None:
    """Settle one of the messages that the callbacks were given."""
    transport = _connection(frame)
    if not transport.given:
        return
    tag = frame.rng.choice(list(transport.given))
    delivery = transport.given.pop(tag)
    how = frame.rng.choices(["ack", "requeue", "reject", "rest"], [12, 2, 1, 1])[0]
    world.note(f"{frame.actor.name}: {how} of {label_of(delivery.payload)}")
    try:
        _settle(transport, tag, how)
    except KombuFDBError:
        if transport.qos.holds(tag) and how in ("requeue", "reject") and frame.rng.random() < 0.5:  # a Celery worker
            if how == "reject":
                frame.actor.rejected.add(delivery.lease)
            transport.qos.settle_later(tag, requeue=how == "requeue")
        elif transport.qos.holds(tag):
            transport.given[tag] = delivery  # the application may try again
        raise


def _settle(transport: SimulatedTransport, tag: int, how: str) -> None:
    if how == "ack":
        transport.qos.ack(tag)
    elif how == "rest":
        transport.qos.release(tag, 3_000)
    else:
        transport.qos.reject(tag, requeue=how == "requeue")


def listen(world: World, frame: Frame) -> None:
    """Another consumer, if one has ended."""
    transport = _connection(frame)
    free = sorted({*world.profile.queues} - {each.queue for each in transport.subscriptions})
    if free:
        queue = frame.rng.choice(free)
        world.note(f"{frame.actor.name} consumes from {queue}")
        transport.consume(queue, f"{frame.actor.name}-{frame.step.number}")


def hush(world: World, frame: Frame) -> None:
    """A consumer ends; what was claimed for it goes back."""
    transport = _connection(frame)
    if transport.subscriptions:
        subscription = frame.rng.choice(transport.subscriptions)
        world.note(f"{frame.actor.name} cancels its consumer of {subscription.queue}")
        transport.cancel(subscription)


def work(world: World, process: Process) -> None:
    """At rest: consume from everything, settle all that comes, until everybody sleeps."""
    transport = process.connection
    assert transport is not None
    transport.reconnect()
    transport.fetcher.attend_loop(registered=True)
    queues = {*world.profile.queues, *(row.queue for row in world.ledger.rows.values())}
    for queue in sorted(queues - {each.queue for each in transport.subscriptions}):
        transport.consume(queue, f"{process.name}-{queue}")
    for _ in range(MOST_TURNS):
        if not _work_once(world, process, transport):
            return
    raise Violation("BOUNDED", f"{process.name} never comes to an end")


def _work_once(world: World, process: Process, transport: SimulatedTransport) -> bool:
    """As an event loop and the receiver's thread do, in turn. False if both sleep."""
    if transport.arrived.rung:
        while _deliver(world, process, transport):
            pass
        transport.arrived.clear()
        while _deliver(world, process, transport):
            pass
    for tag in list(transport.given):
        del transport.given[tag]
        transport.qos.ack(tag)
    if transport.due is not None and 0 < transport.due - world.clock.monotonic() <= NAP_S:
        world.clock.advance(transport.due - world.clock.monotonic())
    if not transport.is_awake:
        return transport.arrived.rung
    transport.turn()
    transport.store.keep_house()
    return True


def _connection(frame: Frame) -> SimulatedTransport:
    transport = frame.actor.connection
    assert transport is not None
    return transport


def _deliver(world: World, process: Process, transport: SimulatedTransport) -> bool:
    try:
        return deliver_next(transport.fetcher)
    except KombuFDBError as error:
        world.note(f"{process.name} connects again after {error!r}")
        transport.reconnect()
        return False


def _given(world: World, process: Process, transport: SimulatedTransport, delivery: Delivery) -> None:
    """A callback was called. Raises ``Violation``."""
    name = label_of(delivery.payload)
    world.note(f"{process.name} is given {name} of {delivery.queue}")
    if delivery.lease.session != transport.fetcher.session_id:
        raise Violation("ONE-OWNER", f"{name} was handed out although its session had ended, and another was begun")


def check_awake(process: Process, transport: SimulatedTransport) -> None:
    """A fetcher that knows of work does not sleep: what rang in the middle of a turn is heard after it."""
    sleeps = not transport.is_awake and (transport.due is None or transport.due > transport.clock() + NAP_S)
    if sleeps and transport.fetcher.asleep and transport.fetcher.attended:
        raise Violation("DURABLE", f"the receiver of {process.name} sleeps, and its consumer drains")
    others = transport.fetcher._claiming.others()
    hungry = transport.watch_set.hungry & transport.fetcher.dispatch.queues - others
    if sleeps and hungry and transport.has_room and not transport.fetcher.asleep:
        raise Violation("DURABLE", f"the receiver of {process.name} sleeps, and {sorted(hungry)} may have messages")


def check_credit(process: Process, transport: SimulatedTransport) -> None:
    """What is held, and what waits for it, is never more than the prefetch."""
    credit = transport.credit
    if len(credit.held) + len(credit.inbox) > credit.prefetch:
        held = f"{len(credit.held)} and {len(credit.inbox)} that wait"
        raise Violation("BOUNDED", f"{process.name} has {held}, with a prefetch of {credit.prefetch}")
