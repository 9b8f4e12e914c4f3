"""A few programs on RabbitMQ and on ours; ``make parity SEEDS="0 500"`` runs more, and each night 500 others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.parity import RULES, Bench, benches, documented, make_program, rabbitmq_unavailable_reason, shrink
from kit.parity.compare import compare
from kit.parity.deviations import Difference
from kit.parity.program import step

#: Seeds that once differed: "SEED why".
FAILED = [int(line.split()[0]) for line in Path(__file__).with_name("parity_seeds.txt").read_text().splitlines()]
SEEDS = range(10)
FULL = {"x-max-length": 0, "x-overflow": "reject-publish"}
#: What once differed, and is in few seeds.
ONCE_DIFFERENT = {
    "a publish to a full queue": [
        step(0, "declare_queue", queue="q0", arguments=FULL),
        step(1, "publish", exchange="", key="q0"),
    ],
    "a consumer's window beside a get": [
        step(0, "declare_queue", queue="q0"),
        step(1, "qos", count=1),
        step(2, "publish", exchange="", key="q0"),
        step(3, "get", queue="q0"),
        step(4, "consume", queue="q0", tag="c0"),
        step(5, "publish", exchange="", key="q0"),
        step(6, "publish", exchange="", key="q0"),
    ],
    "consumers of a deleted queue": [
        step(0, "declare_queue", queue="q0"),
        step(1, "declare_queue", queue="q1"),
        step(2, "qos", "b1", count=1),
        step(3, "consume", queue="q0", tag="c0"),
        step(4, "consume", queue="q0", tag="c1"),
        step(5, "consume", "b1", queue="q1", tag="c0"),
        step(6, "delete_queue", queue="q0"),
        step(7, "publish", exchange="", key="q1"),
        step(8, "delete_queue", queue="q1"),
        step(9, "ack", "b1", at=0),
        step(10, "declare_queue", queue="q0"),
        step(11, "publish", exchange="", key="q0"),
        step(12, "consume", queue="q0", tag="c0"),
    ],
}


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[Bench]:
    reason = rabbitmq_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with benches([request.param]) as found:
        yield found[request.param]


on_both_stores = pytest.mark.parametrize(
    "both", ["sqlite", pytest.param("fdb", marks=pytest.mark.foundationdb)], indirect=True
)


@pytest.mark.process
@pytest.mark.xdist_group("rabbitmq")
@on_both_stores
class TestOnRabbitMQ:
    @pytest.mark.parametrize("seed", [*SEEDS, *FAILED])
    def test_a_program_observes_the_same(self, both: Bench, seed: int) -> None:
        verdict = both.verdict(make_program(seed))
        assert not verdict.unexplained, f"python -m kit.parity {seed}\n{verdict}"

    @pytest.mark.parametrize("program", [*ONCE_DIFFERENT])
    def test_what_once_differed_is_the_same(self, both: Bench, program: str) -> None:
        """To its end: no deviation is there."""
        verdict = both.verdict(ONCE_DIFFERENT[program])
        assert not verdict.unexplained, str(verdict)
        assert verdict.shown <= {"dead-letters-kept"}  # which any look at a queue shows

    @pytest.mark.parametrize("rule", [*RULES])
    def test_each_deviation_is_there(self, both: Bench, rule: str) -> None:
        """Or its line in the docs is out of date."""
        verdict = both.verdict(RULES[rule].witness)
        assert not verdict.unexplained, str(verdict)
        assert rule in verdict.shown


def test_the_docs_list_each_deviation_once() -> None:
    assert sorted(documented()) == sorted(RULES)


def test_what_the_docs_do_not_list_is_a_difference() -> None:
    program = [step(0, "declare_queue", queue="q0", passive=True)]
    theirs, ours = [{("channel closed",): True}], [{("channel closed",): False}]
    verdict = compare(program, theirs, ours, [])
    assert verdict.unexplained == [Difference(("channel closed",), True, False)]
    assert not compare(program, theirs, ours, ["channel-stays-open"]).unexplained


def test_a_program_is_made_small() -> None:
    """As long as it shows what it showed."""

    def verdict_of(program):
        numbers = {each.number for each in program}
        seen = [{("result",): each.number} for each in program]
        other = [{("result",): None if each.number == 30 and {3, 17} <= numbers else each.number} for each in program]
        return compare(program, seen, other, [])

    small, verdict = shrink([step(number, "publish") for number in range(40)], verdict_of)
    assert [each.number for each in small] == [3, 17, 30]
    assert verdict.step == small[-1]


def test_a_seed_is_a_program() -> None:
    assert make_program(7) == make_program(7) != make_program(8)
