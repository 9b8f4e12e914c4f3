"""Which test comes when, if several processes share them."""

from itertools import groupby

from kit.order import spread


def order(tests):
    return spread(tests, waits=lambda test: test.startswith("wait"), file=lambda test: test.split(":")[0])


def test_what_waits_is_spread_and_not_at_the_end():
    waiting = [f"wait{file}:{number}" for file in range(4) for number in range(10)]
    others = [f"{file}:{number}" for file in range(20) for number in range(5)]
    ordered = order(waiting + others)
    side_by_side = [len(list(group)) for waits, group in groupby(ordered, lambda test: "wait" in test) if waits]
    assert max(side_by_side) <= 3
    assert not any("wait" in test for test in ordered[-10:])
    assert [test for test in ordered if "wait" in test] == waiting
    assert [test for test in ordered if "wait" not in test] == others
    assert order([]) == []
    for one_kind in (["wait:2", "wait:1"], ["b:1", "a:1", "b:2"]):
        assert order(one_kind) == one_kind
