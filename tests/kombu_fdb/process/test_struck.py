"""A wait queue whose first one is struck at each operation of the store, from its look to the end of a service.

In the simulation's world, whose ledger looks at every commit: nothing is lost or doubled, the order is kept, and no
consumer is granted what it did not wait for. Moreover the others go on soon (``docs/guarantees.md``).
"""

from dataclasses import replace

import pytest
from kit.faults import Fault
from kit.simulation import PROFILES, Violation
from kit.simulation.acts.actions import ACTIONS
from kit.simulation.acts.consuming import connect, turn
from kit.simulation.acts.rest import come_to_rest
from kit.simulation.plan import Step, Trouble
from kit.simulation.world import World

from kombu_fdb.process.combiner_client import CombinerClient
from kombu_fdb.process.failure_detector import FailureDetector
from kombu_fdb.transport.consuming.receiver import deliver_next

#: Calm but for what strikes; one publish fills everybody's window.
PROFILE = replace(PROFILES["waiters"], queues={"plain": {}, "fair": {}}, delayed=0.0, expiring=0.0, batches=(8,))
CREW = 4
#: Until the one behind it has gone on, and all are served.
REPLACED_S = 1.0
#: Of the store, in the turns in which it serves itself alone, and others too; and which of them is the commit.
OPERATIONS = {False: 5, True: 14}
COMMIT = {False: 3, True: 12}
#: Turns in which an idle first one does what has come: it looks at the queues, and serves.
TURNS = 3


class Crew:
    """Connections of as many processes, idle in one wait queue."""

    def __init__(self):
        self.world = World(PROFILE, {**ACTIONS, "turns": ("receiver", self._take_turns)}, connect)
        self.operations = 0
        for slot in range(CREW):
            connection = self.world.start(slot).connection
            assert connection is not None
            connection.fetcher.attend_loop(registered=True)
            connection.credit.prefetch = 2
        self.go_on(2.0)

    def go_on(self, seconds):
        """Everybody acts when he is woken, or wants to look."""
        end_s = self.world.clock.monotonic() + seconds
        while self.world.clock.monotonic() < end_s:
            for slot, process in sorted(self.world.processes.items()):
                self.world.perform(Step("go on", "turn", slot, 1))
                if process.connection is not None:
                    process.connection.reconnect()
                    self._work_off(slot)
            self.world.pass_time(0.02)

    def _work_off(self, slot):
        process = self.world.processes.get(slot)
        with self.world.acting(Step("work", "drain", slot, 1), process, "main"):
            transport = process.connection if process else None
            while transport is not None and deliver_next(transport.fetcher):
                for tag in list(transport.given):
                    del transport.given[tag]
                    transport.qos.ack(tag)

    def strike(self, number, fault, *, granting):
        """The first one, at an operation of the turns in which it serves. Whether there were so many.

        ``granting``: the next one, which sees the others there; an idle first one serves itself alone.
        """
        self.world.perform(Step("new", "publish", CREW - 1, 7))
        if granting:
            self.world.perform(Step("served", "turns", self._awake(), 3))
        self.world.perform(Step("struck", "turns", self._awake(), 3, (Trouble("operation", number, fault),)))
        return self.operations > number

    def _awake(self):
        """Whose turn it is."""
        crew = sorted(self.world.processes.items())
        first = [slot for slot, each in crew if _standing(each).is_first]
        return [*first, *(slot for slot, each in crew if each.connection and each.connection.is_awake)][0]

    def _take_turns(self, world, frame):
        try:
            for _ in range(TURNS):
                turn(world, frame)
        finally:
            self.operations = frame.operations

    def left(self):
        """What no session holds, and no consumer gets."""
        return [str(row) for row in self.world.ledger.rows.values() if row.state == "ready"]


def _standing(process):
    assert process.connection is not None
    return process.connection.fetcher._claiming.combiner


def strike_and_rest(number, fault, *, granting):
    """Whether there were so many operations. Raises ``Violation``."""
    crew = Crew()
    struck = crew.strike(number, fault, granting=granting)
    crew.go_on(REPLACED_S)
    if crew.left():
        raise Violation("BOUNDED", f"{crew.left()} after {REPLACED_S} s")
    come_to_rest(crew.world)
    return struck


@pytest.mark.parametrize("granting", [False, True])
def test_a_first_one_that_is_killed_anywhere_breaks_nothing(granting):
    deaths = 0
    while strike_and_rest(deaths, None, granting=granting):
        deaths += 1
    assert deaths == OPERATIONS[granting]


@pytest.mark.parametrize("granting", [False, True])
@pytest.mark.parametrize(
    "fault", [Fault.ANSWER_LOST_APPLIED, Fault.ANSWER_LOST_NOT_APPLIED, Fault.COMMIT_LATE], ids=str
)
def test_a_service_whose_answer_is_lost_breaks_nothing(fault, granting):
    assert strike_and_rest(COMMIT[granting], fault, granting=granting)


#: By what it violates: what is not done then, and where the first one is killed: before its commit, or behind it.
BROKEN = {
    "BOUNDED": (CombinerClient, "_is_idle", False, COMMIT[True]),
    "BACK-SOON": (FailureDetector, "silent", [], COMMIT[True] + 1),
}


@pytest.mark.parametrize("guarantee", BROKEN)
def test_what_is_broken_is_noticed(monkeypatch, guarantee):
    """A dead first one is not replaced; what it had is not brought back."""
    owner, attribute, result, number = BROKEN[guarantee]
    monkeypatch.setattr(owner, attribute, lambda *_: result)
    with pytest.raises(Violation) as found:
        strike_and_rest(number, None, granting=True)
    assert found.value.guarantee == guarantee
