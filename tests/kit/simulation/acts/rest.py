"""What must come about when nothing goes wrong any more: the guarantees that promise something within a time.

:func:`calm` lets a session's life and two sweeps pass and looks for what should be elsewhere by then (BACK-SOON,
BOUNDED). :func:`come_to_rest` also takes all limits away, lets every consumer take what it is woken for, and wants the
store to be empty (DURABLE, FAIR): a message that no consumer gets is as good as lost.
"""

from __future__ import annotations

from functools import partial

from kit.simulation.acts.consuming import work
from kit.simulation.acts.owners import consumers_of, settle_again, take
from kit.simulation.plan import Step
from kit.simulation.process import Process
from kit.simulation.violation import Violation
from kit.simulation.world import BEAT_INTERVAL_S, DEAD_LENGTH, SESSION_TTL_S, SWEEP_INTERVAL_S, World
from kombu_fdb.engine import topology

#: Of the duties, until nothing is left for any of them to do at once.
MOST_ROUNDS = 300


def calm(world: World) -> None:
    """A while without faults. Raises ``Violation``."""
    world.note("calm")
    _heal(world)
    began_s = world.clock.monotonic()
    for _ in range(int((SESSION_TTL_S + 2 * SWEEP_INTERVAL_S) / BEAT_INTERVAL_S) + 1):
        _tick(world)
    _check_leases(world)
    _check_delayed(world)
    world.clocks.check_waits(began_s, world.clock.monotonic())


def come_to_rest(world: World) -> None:
    """The end of a run. Raises ``Violation``."""
    world.note("rest")
    if world.profile.rates:
        calm(world)  # by clocks that are wrong
    for process in world.processes.values():
        process.clock.offset_ms = 0
    calm(world)
    # Past whatever is delayed, by a wall clock that was ahead too, and past the next trimming of dead letters.
    world.pass_time(901.0)
    calm(world)
    # What came due with that is trimmed by the next.
    world.pass_time(301.0)
    calm(world)
    _check_dead(world)
    _check_full(world)
    _open_everything(world)
    _consume(world)
    calm(world)
    _consume(world)
    _check_consumers(world)
    left = [f"{world.ledger.label(row)} {row}" for row in world.ledger.rows.values()]
    if left:
        raise Violation("DURABLE", f"no consumer gets {', '.join(sorted(left))}")
    if world.database.open_transactions:
        raise Violation("BOUNDED", f"{world.database.open_transactions} transactions were begun and never ended")


def _heal(world: World) -> None:
    with world.acting(Step("heal", "heal", 0, 1)):
        world.database.land_late_commits()
    if not world.processes:
        world.start(0)
    for process in world.processes.values():
        process.asleep_until = process.cut_until = 0.0
        process.link.cut = False
    _look(world)
    _tick(world)
    _look(world)  # those that only now have heard that they were fenced


def _look(world: World) -> None:
    """The safety looks of receivers whose session is lost: they begin another one, as their programs drain."""
    for slot, process in list(world.processes.items()):
        if process.client_session.lost and process.connection is not None:
            with process.connection.draining():
                process.connection.bell.ring()
                world.perform(Step("look", "turn", slot, 1))


def _tick(world: World) -> None:
    world.pass_time(BEAT_INTERVAL_S)
    for slot, process in sorted(world.processes.items()):
        for _ in range(MOST_ROUNDS):
            world.perform_as(slot, "duties")
            if process.pause_s or world.processes.get(slot) is not process:
                break
        else:
            raise Violation("BOUNDED", f"{process.duties.unfinished()} of {process.name} never come to an end")


def _check_leases(world: World) -> None:
    """BACK-SOON: each session that holds a message lives."""
    living = {process.session for process in world.processes.values()}
    for row in world.ledger.rows.values():
        if row.state == "leased" and row.session not in living:
            raise Violation("BACK-SOON", f"{world.ledger.label(row)} is {row}, which is long dead")
    if world.ledger.lines.waiting - living:
        raise Violation("BOUNDED", "a session stands in a wait queue that is long dead")


def _check_delayed(world: World) -> None:
    """What is due by everybody's clock is ready."""
    now_ms = world.clock.wall_ms() + min(process.clock.offset_ms for process in world.processes.values())
    for row in world.ledger.rows.values():
        if row.state == "delayed" and row.due_ms < now_ms - BEAT_INTERVAL_S * 1000:
            late_s = (now_ms - row.due_ms) / 1000
            raise Violation("BACK-SOON", f"{world.ledger.label(row)} is {row}, due {late_s:.0f} s ago")


def _check_dead(world: World) -> None:
    """No queue of ours without a bound."""
    for (queue, state), number in sorted(world.ledger.counts.items()):
        if queue.endswith(".dead") and state == "ready" and number > DEAD_LENGTH:
            raise Violation("BOUNDED", f"{queue} keeps {number} messages, not {DEAD_LENGTH}")


def _check_full(world: World) -> None:
    """What the oldest give way in is not longer than it may be."""
    for queue, given in world.profile.queues.items():
        rows = [row for row in world.ledger.rows.values() if row.queue == queue and row.state == "ready"]
        size = sum(row.record.size for row in rows)
        full = len(rows) > given.get("x-max-length", len(rows)) or size > given.get("x-max-length-bytes", size)
        if full and given.get("x-overflow", "drop-head") == "drop-head":
            raise Violation("BOUNDED", f"{queue} keeps {len(rows)} messages, {size} bytes")


def _check_consumers(world: World) -> None:
    """None in the store has left."""
    transports = [process.connection for process in world.processes.values() if process.connection is not None]
    own = {each.tag for every in transports for each in every.subscriptions}
    for queue in world.profile.queues if transports else ():
        with world.acting(Step("count", "limit", 0, 1)):
            read = transports[0].store.engine.transactions.read
            stored = read(partial(topology.consumer_tags, queue=queue))
        if not own.issuperset(stored):
            raise Violation("BOUNDED", f"{queue} keeps the consumers {sorted({*stored} - own)}, which have left")


def _open_everything(world: World) -> None:
    with world.acting(Step("open", "limit", 0, 1)):
        engine = next(iter(world.processes.values())).engine
        for queue in world.profile.queues:
            if engine.inspect.control(queue).paused or engine.inspect.control(queue).limited:
                engine.queues.change_control(queue, paused=False)
            for key in world.profile.keys if queue.startswith("fair") else ():
                engine.queues.limit(queue, key, None)
            engine.queues.change_control(queue, every_key={"max_in_flight": None})


def _consume(world: World) -> None:
    """Every consumer takes and acks what it finds, and sleeps only when it is told that there is nothing."""
    queues = sorted({row.queue for row in world.ledger.rows.values()} | set(world.profile.queues))
    if world.profile.connected:
        _work(world)
        return
    for process in world.processes.values():
        process.stop_waiting()
    for _ in range(400):
        awake = [process for process in world.processes.values() if process.woken]
        if not awake:
            return
        for process in awake:
            _turn(world, process, queues)
    raise Violation("BOUNDED", "the consumers never come to an end")


def _work(world: World) -> None:
    """The same through the transport; what one gives back wakes the others."""
    for _ in range(2 * len(world.processes)):
        for process in list(world.processes.values()):
            with world.acting(Step("consume", "claim", 0, 1), process, "main"):
                work(world, process)


def _turn(world: World, process: Process, queues: list[str]) -> None:
    with world.acting(Step("consume", "claim", 0, 1), process, "main"):
        settle_again(world.frames[-1])
        if take(world, world.frames[-1], queues, 50, list(process.held)):
            return
        watches = process.engine.messages.arm(queues, process.session, consumers_of(world, process, queues))
        if watches is not None:
            process.watches, process.woken = watches, False
            for watch in watches:
                watch.on_fire(process.wake)
