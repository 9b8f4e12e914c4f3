"""State machines of Hypothesis, whose histories share a store and have a namespace each."""

from __future__ import annotations

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from kombu_fdb.store.protocol import Database


class Machine(RuleBasedStateMachine):
    #: Of the class that :func:`run` makes of it.
    database: Database


def run(
    machine: type[Machine], database: Database, *, examples: int, steps: int = 50, derandomize: bool = False
) -> None:
    """``derandomize``: the same histories each time."""
    on_it = type(machine.__name__, (machine,), {"database": database})
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, derandomize=derandomize
    )
    run_state_machine_as_test(on_it, settings=chosen)
