"""Which test comes when, if several processes share them."""

from __future__ import annotations

from itertools import groupby

from kit.order import spread


def order(tests: list[str]) -> list[str]:
    return spread(tests, waits=lambda test: test.startswith("wait"), file=lambda test: test.split(":")[0])


def test_what_waits_is_spread_and_not_at_the_end() -> None:
    waiting = [f"wait{file}:{number}" for file in range(4) for number in range(10)]
    others = [f"{file}:{number}" for file in range(20) for number in range(5)]
    ordered = order(waiting + others)
    side_by_side = [len(list(group)) for waits, group in groupby(ordered, lambda test: "wait" in test) if waits]
    assert max(side_by_side) <= 3
    assert not any("wait" in test for test in ordered[-10:])
    assert [test for test in ordered if "wait" in test] == waiting
    assert [test for test in ordered if "wait" not in test] == others


def test_nothing_stands_between_the_tests_of_a_file() -> None:
    others = [f"{file}:{number}" for file in range(3) for number in range(5)]
    ordered = order(["wait:1", "wait:2", *others])
    assert [file for file, _ in groupby(ordered, lambda test: test.split(":")[0]) if file != "wait"] == ["0", "1", "2"]


def test_some_tests_of_one_kind_keep_their_order() -> None:
    assert order([]) == []
    assert order(["wait:2", "wait:1"]) == ["wait:2", "wait:1"]
    assert order(["b:1", "a:1", "b:2"]) == ["b:1", "a:1", "b:2"]
