"""What happens to processes and to the store: time, outages, frozen machines, cut links, clocks that are set."""

from __future__ import annotations

from kit.faults import Fault
from kit.simulation.acts import rest
from kit.simulation.plan import Step
from kit.simulation.process import Frame
from kit.simulation.world import SESSION_TTL_S, World


def freeze(world: World, frame: Frame) -> None:
    """SIGSTOP, a suspended laptop: no thread of it does anything for a while."""
    seconds = frame.rng.choice([10, 35, 60])
    frame.actor.asleep_until = world.clock.monotonic() + seconds
    world.note(f"{frame.actor.name} freezes for {seconds} s")


def wake(world: World, _frame: Frame) -> None:
    """SIGCONT, or the network is back: each process that was away beats at once."""
    for slot, process in sorted(world.processes.items()):
        if process.link.cut or process.asleep_until > world.clock.monotonic():
            process.asleep_until, process.link.cut = 0.0, False
            world.note(f"{process.name} wakes")
            world.perform_as(slot, "beat")


def cut(world: World, frame: Frame) -> None:
    """The network between one process and the store."""
    process = frame.actor
    seconds = frame.rng.choice([10, 35, 60])
    process.link.cut, process.cut_until = True, world.clock.monotonic() + seconds
    world.note(f"{process.name} is cut off for {seconds} s")


def jump(world: World, frame: Frame) -> None:
    """One machine's wall clock is set."""
    seconds = frame.rng.choice([*world.profile.jumps])
    process, most_ms = frame.actor, world.profile.most_off_s * 1000
    process.clock.offset_ms = max(-most_ms, min(most_ms, process.clock.offset_ms + seconds * 1000))
    world.skew.note(process.clock.offset_ms)
    world.note(f"the wall clock of {process.name} jumps by {seconds} s")


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
    """The store is down for longer than a session lives; then all processes come back, in any order."""
    if world.faults.outage:
        return
    world.faults.outage = frame.rng.choice([Fault.UNAVAILABLE, Fault.UNAVAILABLE, Fault.TOO_OLD])
    world.note(f"from now on: {world.faults.outage.value}")
    began = world.clock.monotonic()
    for _ in range(frame.rng.choice([2, 8, 10])):
        world.clock.advance(5.0)
        world.beat_all()
    world.faults.outage = None
    # Between the looks before and after it, a quarter of a session's life counts (``FailureDetector``).
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
