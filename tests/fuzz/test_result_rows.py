"""One row of the results is damaged, in its key or its value: all other results and chords go on.

The oracle. Sweeps and looks for abandoned chords raise nothing and come to an end. Who asks for just the thing that
can't be read is told so, by ``FormatError``. What the row is not of is as it was, and its chord is published once. What
it is of is deleted and made anew, and is then as any other.
"""

from contextlib import suppress
from functools import cache, partial

from celery.states import STARTED, SUCCESS
from kit.faults import FaultyDatabase
from store_rows import mutated, replace, telling, write_all

from celery_fdb.results import chords
from celery_fdb.results.chords import ChordOver, ChordPart
from celery_fdb.results.records import INLINE_BYTES
from celery_fdb.results.store import ResultStore
from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.layout import range_of, unpack
from kombu_fdb.testing.clock import ManualClock

LARGE = b"x" * (2 * INLINE_BYTES + 5)
TASKS = ("small", "large", "started")
#: Complete and unclaimed; waits for more; has very many that joined.
CHORDS = ("complete", "open", "many")
JOINED = 4


def test_a_damaged_row_of_the_results_stops_nothing_else(fuzz):
    def target(rng):
        store, clock = opened()
        sort = rng.choice(sorted({sort_of(row) for row in rows()}))
        row = rng.choice([each for each in rows() if sort_of(each) == sort and b"safe" not in each[0]])
        damaged = mutated(rng, row, store.keys.prefix)
        store._write(lambda tr: write_all(tr, rows()))
        store._write(partial(replace, row=row, damaged=damaged, beside=rng.random() < 0.3))
        with telling(row, damaged):
            look_around(store)
            go_on(store, clock)
            look_around(store)
            begin_anew(store, clock)

    fuzz(target)


def opened():
    clock = ManualClock()
    return ResultStore(FaultyDatabase(clock=clock), "fuzz", clock=clock), clock


def sort_of(row):
    """What kind of row: its first word, and of a chord's own rows the second one."""
    store, _ = opened()
    first, _id, *more = unpack(row[0][len(store.keys.prefix) :])
    return (str(first), *map(str, more[:1] if first == "chord" else ["chunk"] * len(more[:1])))


@cache
def rows():
    """Results with a row of every kind; those of "safe" are never touched."""
    store, clock = opened()
    soon = clock.wall_ms() + 60_000
    for task_id, state, payload in (("small", SUCCESS, b"1"), ("large", SUCCESS, LARGE), ("started", STARTED, b"")):
        store.store(task_id, state, payload, soon)
    store.save_group("group", LARGE, soon)
    store.store("safe", SUCCESS, LARGE, 0)
    for group_id in (*CHORDS, "safe"):
        fill(store, group_id, 0 if group_id == "safe" else soon)
    with_few_within(lambda: [store.enlarge_chord("many", joined=f"j{number}") for number in range(JOINED)])
    return store._read(lambda tr: tr.get_range(*range_of(store.keys.prefix)))


def fill(store, group_id, expires_ms):
    store.open_chord(group_id, LARGE if group_id == "complete" else b"body", expires_ms)
    store.enlarge_chord(group_id, size=9 if group_id == "open" else 3)
    store.add_part(ChordPart(group_id, 0, "t0", SUCCESS, b"1"))
    store.add_part(ChordPart(group_id, 1, "t1", SUCCESS, LARGE))
    store.add_part(ChordPart(group_id, 2, "t2", SUCCESS, None))


def with_few_within(work):
    """Of those that joined, one has its place in the chord's own row."""
    before, chords.JOINED_WITHIN = chords.JOINED_WITHIN, 1
    try:
        work()
    finally:
        chords.JOINED_WITHIN = before


def look_around(store):
    """Every verb that only reads."""
    for task_id in TASKS:
        store.exists(task_id)
        with suppress(FormatError):
            store.load(task_id)
        with suppress(FormatError):
            for _, watch in store.look([task_id], timeout_s=5):
                if watch is not None:
                    watch.cancel()
    with suppress(FormatError):
        store.load_group("group")
    for group_id in CHORDS:
        with suppress(FormatError, ChordOver):
            store.parts(group_id)
        with suppress(FormatError):
            store.chord_body(group_id)


def go_on(store, clock):
    """What workers do: results come, the chords of the dead are published, what has expired is deleted."""
    published = [*more_parts(store)]
    for _ in range(6):
        clock.advance(chords.CLAIM_MS / 1000)
        for group_id in store.abandoned_chords():
            with suppress(FormatError, ChordOver):
                store.parts(group_id)
                store.chord_body(group_id)
                store._write(store.finishing(group_id))
                published.append(group_id)
        assert store.abandoned_chords() == [], "the claim is held by the call that found it"
    assert published.count("safe") == 1
    clock.advance(60)
    store.sweep(parts=10)
    assert store.sweep(parts=1) == 0, "it comes to an end"
    record = store.load("safe")
    assert record.payload == LARGE


def more_parts(store):
    """Returned once more, and one more: the worker that finds its chord complete is killed before it can publish."""
    for group_id in CHORDS:
        for place in (0, 3):
            with suppress(FormatError):
                part = ChordPart(group_id, place, f"t{place}", SUCCESS, b"1")
                store.store(part.task_id, SUCCESS, b"1", 0, part)
                store.claim_chord(part)
    return []


def begin_anew(store, clock):
    """The same ids once more, as a task that is retried and a frozen chord have them."""
    for task_id in TASKS:
        store.forget(task_id)
        store.store(task_id, SUCCESS, b"anew", 0)
        assert (found := store.load(task_id)) is not None
        assert found.payload == b"anew"
    store.delete_group("group")
    store.save_group("group", b"anew", 0)
    assert (found := store.load_group("group")) is not None
    assert found.payload == b"anew"
    for group_id in CHORDS:
        store.open_chord(group_id, b"anew", 0)
        store.enlarge_chord(group_id, size=2)
        first, last = (ChordPart(group_id, at, f"t{at}", SUCCESS, each) for at, each in enumerate((b"1", LARGE)))
        store.add_part(first)
        assert store.claim_chord(first) == "nothing"
        store.add_part(last)
        assert store.claim_chord(last) == "publish"
        assert [each.payload for each in store.parts(group_id)] == [b"1", LARGE]
        assert store.chord_body(group_id) == b"anew"
        store._write(store.finishing(group_id))
    clock.advance(chords.LONGEST_LOOK_MS / 1000)
    assert not {*store.abandoned_chords()} & {*CHORDS, "safe"}
