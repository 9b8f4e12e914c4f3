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
