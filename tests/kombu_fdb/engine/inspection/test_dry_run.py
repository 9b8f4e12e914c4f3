"""A dry run shows what its verb would see, had it written; and writes nothing."""

from hypothesis import given, settings
from hypothesis import strategies as st
from kit.faults import FaultyDatabase

from kombu_fdb.engine.inspection.browse import DryRun

KEYS = [b"%d" % number for number in range(10)]
FIRST = dict.fromkeys(KEYS[::2], b"stored")

writes = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(KEYS), st.just(b"own")),
        st.tuples(st.just("clear"), st.sampled_from(KEYS)),
        st.tuples(st.just("clear_run"), st.integers(0, 9).map(lambda first: KEYS[first : first + 3])),
    ),
    max_size=6,
)
ranges = st.tuples(st.sampled_from(KEYS), st.sampled_from([*KEYS, b"x"]), st.integers(0, 4))


def filled():
    database = FaultyDatabase()
    tr = database.begin(timeout_s=5)
    for key, value in FIRST.items():
        tr.set(key, value)
    tr.commit()
    return database


def looks(tr, wanted, *, reverse):
    """By each of the ways to read."""
    one_by_one = [tr.get_range(begin, end, limit=limit, reverse=reverse) for begin, end, limit in wanted]
    together = tr.get_together(KEYS, wanted)
    return [[tr.get(key) for key in KEYS], tr.get_many(KEYS), one_by_one, tr.get_ranges(wanted), together]


@settings(max_examples=150)
@given(writes=writes, wanted=st.lists(ranges, min_size=1, max_size=3), reverse=st.booleans())
def test_it_sees_what_a_transaction_sees_that_wrote_the_same(writes, wanted, *, reverse):
    database = filled()
    wet, inner = database.begin(timeout_s=5), database.begin(timeout_s=5)
    dry = DryRun(inner)
    for verb, *arguments in writes:
        getattr(wet, verb)(*arguments)
        getattr(dry, verb)(*arguments)
    assert looks(dry, wanted, reverse=reverse) == looks(wet, wanted, reverse=reverse)
    assert dict(database.begin(timeout_s=5).get_range(b"", b"\xff")) == FIRST


def test_it_conflicts_with_no_transaction_and_passes_over_what_only_counts():
    database = filled()
    inner = database.begin(timeout_s=5)
    dry = DryRun(inner)
    assert dry.read_only
    looks(dry, [(b"0", b"9", 0)], reverse=False)
    dry.add(KEYS[0], 1)
    dry.byte_max(KEYS[0], b"x")
    dry.fill(moving=True)
    dry.set_versionstamped_key(b"p", b"s", b"v")
    dry.set_versionstamped_value(KEYS[0], b"p", b"s")
    dry.add_read_conflict_key(KEYS[0])
    dry.add_read_conflict_range(b"0", b"9")
    assert dry.get(KEYS[1]) is None
    inner.set(b"of the inner one", b"")  # a transaction without writes never conflicts, whatever it has read
    other = database.begin(timeout_s=5)
    other.set(KEYS[0], b"changed")
    other.commit()
    inner.commit()
    assert database.begin(timeout_s=5).get(KEYS[0]) == b"changed"
