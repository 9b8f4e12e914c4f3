"""What operators do to a queue while it is worked on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kit import duties
from kit.simulation.process import Frame
from kit.simulation.world import World
from kombu_fdb.engine.dead_letters import LetterWalk
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import FormatError, QueueError
from kombu_fdb.keyspace.codec import AMOUNT_BYTES, encode_amount
from kombu_fdb.keyspace.layout import STAMP_CODE, Keyspace
from kombu_fdb.model import KeyLimits, QueueControl, View


def limit(world: World, frame: Frame) -> None:
    """Pause a key, limit it, or set it free."""
    key, rng = frame.rng.choice([*world.profile.keys]), frame.rng
    queue = rng.choice([queue for queue in world.profile.queues if queue.startswith("fair")])
    rates = [KeyLimits(rate=rate, burst=burst) for rate, burst in world.profile.rates]
    limits = rng.choice(
        rates
        or [
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
    frame.actor.engine.queues.limit(queue, key, limits)


def pause(world: World, frame: Frame) -> None:
    """Pause or resume a queue, limit every key, let newcomers in sooner."""
    queue = frame.rng.choice([*world.profile.queues])
    every_key = KeyLimits(max_in_flight=2) if queue.startswith("fair") and frame.rng.random() < 0.3 else KeyLimits()
    newcomer = frame.rng.choice(["next", "next", "current", "first"])
    control = QueueControl(paused=frame.rng.random() < 0.3, newcomer=newcomer, every_key=every_key)
    world.note(f"control of {queue}: {control}")
    frame.actor.engine.queues.set_control(queue, control)


def purge(world: World, frame: Frame) -> None:
    queue = frame.rng.choice([*world.profile.queues])
    world.note(f"purge {queue}: {frame.actor.engine.queues.purge(queue)}")


def delete(world: World, frame: Frame) -> None:
    """One message, wherever it is."""
    rows = sorted({(row.queue, row.record.message_id) for row in world.ledger.rows.values() if not row.malformed})
    if rows:
        queue, message_id = frame.rng.choice(rows)
        world.note(f"delete {message_id.hex()[:6]} of {queue}")
        frame.actor.engine.messages.delete(queue, message_id)


def replay(world: World, frame: Frame) -> None:
    """Bring dead letters back."""
    queue = frame.rng.choice([*world.profile.queues])
    world.note(f"replay {queue}: {duties.replay(frame.actor.engine, queue, frame.rng.choice([1, 3]))}")


def garble(world: World, frame: Frame) -> None:
    """Bytes in the ready range that no version of ours has written."""
    queue, value = frame.rng.choice([*world.profile.queues]), frame.rng.randbytes(12)
    world.note(f"malformed bytes in {queue}")
    keys: Keyspace = world.ledger.keys
    tr = frame.actor.link.begin(timeout_s=1.0)
    try:
        tr.set_versionstamped_key(keys.items(queue, "", keys.rank(0)) + STAMP_CODE, b"\0\0", value)
        tr.add(keys.count(queue, "ready"), encode_amount(1, len(value)), width=AMOUNT_BYTES)
        tr.set_versionstamped_value(keys.bell(queue))
        tr.commit()
    finally:
        tr.cancel()


def drop(world: World, frame: Frame) -> None:
    """Delete a queue and declare it anew."""
    queue = frame.rng.choice([*world.profile.queues])
    world.note(f"drop {queue}: {frame.actor.engine.queues.delete(queue)}")
    frame.actor.engine.queues.declare(world.declaration(queue))


def cancel(world: World, frame: Frame) -> None:
    """Take a task back by its id."""
    tasks = sorted({row.record.task_id for row in world.ledger.rows.values() if row.record.task_id})
    if tasks:
        task_id = frame.rng.choice(tasks)
        taken = frame.actor.engine.messages.cancel(task_id)
        world.note(f"cancel {task_id}: {[each.queue for each in taken]}")


def move(world: World, frame: Frame) -> None:
    """Some messages from one queue to the end of another."""
    source, target = frame.rng.sample([*world.profile.queues], 2)
    moved = frame.actor.engine.messages.move(source, target, frame.rng.choice([1, 3, None]))
    world.note(f"move {moved} from {source} to {target}")


def reschedule(world: World, frame: Frame) -> None:
    """A message that waits, as a page shows it, becomes due at another moment, or now."""
    engine, rng = frame.actor.engine, frame.rng
    queue, view = rng.choice([*world.profile.queues]), rng.choice([View("ready"), View("delayed")])
    seen = engine.inspect.page(queue, view, 5).messages
    if seen:
        listed, due_ms = rng.choice(seen), rng.choice([0, engine.transactions.now() + rng.randrange(1, 20_000)])
        with suppress(QueueError, FormatError):  # it expires before that; malformed bytes
            done = engine.messages.reschedule(queue, listed.spot, due_ms)
            world.note(f"reschedule {listed.message.message_id.hex()[:6]} of {queue} to {due_ms}: {done}")


def walk(world: World, frame: Frame) -> None:
    """Through a queue of dead letters, part by part, to replay them."""
    _walk(world, frame, lambda engine, *part: engine.dead_letters.replay_part(*part))


def discard(world: World, frame: Frame) -> None:
    """The same, to delete them."""
    _walk(world, frame, lambda engine, *part: engine.dead_letters.discard_part(*part))


def _walk(world: World, frame: Frame, verb: Callable[[Engine, LetterWalk, bytes, int], tuple[int, bytes]]) -> None:
    engine, dead = frame.actor.engine, frame.rng.choice([*world.profile.queues]) + DEAD_SUFFIX
    through, cursor, total = engine.dead_letters.walk(dead), b"", 0
    while True:
        moved, cursor = verb(engine, through, cursor, frame.rng.choice([1, 2]))
        total += moved
        if not cursor:
            break
    world.note(f"{frame.verb} of {dead}: {total}")
