"""Searching a queue: what a filter lets pass, in pages that cost the same in a queue of any length."""

import json
import random

import pytest
from kit.costs import cost

from celery_fdb.inspection import filters as module
from celery_fdb.inspection.filters import Filter, group, letters_in, search
from celery_fdb.inspection.message import MessageView
from celery_fdb.inspection.overview import find_keys
from celery_fdb.tasks.failures import _attempts
from kombu_fdb.engine.dead_letters import LetterWalk
from kombu_fdb.errors import InvalidArgument
from kombu_fdb.keyspace.codec import ATTEMPTS, PAYLOAD_HEAD, PAYLOAD_VERSION
from kombu_fdb.model import Death, KeyLimits, Peeked, Publication

HOUR_MS = 3_600_000
TASKS = ["shop.charge", "shop.charge", "shop.mail", "", "news.send"]
ERRORS = ["shop.errors.Declined", "builtins.KeyError", "", None, 5]


def envelope(task, **headers):
    meta = ["application/json", "utf-8", {"task": task, **headers} if task else {}, {}, "", "q"]
    encoded = json.dumps(meta).encode()
    return PAYLOAD_HEAD.pack(PAYLOAD_VERSION, len(encoded)) + encoded + b"[[], {}, {}]"


def publish(broker, *publications):
    broker._engine.publisher.publish(publications)


def bury(broker, number, chance):
    """Dead letters of several causes in ``q.dead``."""
    for _ in range(number):
        task, key = chance.choice(TASKS), chance.choice(["", "acme", "zoo"])
        publish(broker, Publication("", "q", envelope(task), key=key, task_id=f"id-{chance.randrange(10**6)}"))
        (lease,) = (each._delivery.lease for each in broker.queue("q").take_many(1, 10))
        broker._engine.messages.reject(
            [lease], reason=chance.choice(["rejected", "slow"]), error_class=chance.choice(ERRORS)
        )


def everything(queue, wanted, limit=3, **where):
    """All pages, one after the other."""
    found = []
    following = b""
    while following is not None:
        page, _, following = search(queue, wanted, limit, after=following, **where)
        assert len(page) <= limit
        found += page
    return found


FILTERS = [
    Filter(),
    Filter(task="shop.charge"),
    Filter(task="shop.*"),
    Filter(task="-"),
    Filter(error="Declined"),
    Filter(error="shop.errors.Declined"),
    Filter(error="eclined"),
    Filter(error="-"),
    Filter(reason="slow"),
    Filter(reason="-"),
    Filter(home="q"),
    Filter(home="elsewhere"),
    Filter(key="acme"),
    Filter(key=""),
    Filter(text="ID-1"),
    Filter(task="shop.*", error="KeyError", reason="slow", key="zoo"),
    Filter(died=True),
    Filter(error="KeyError"),
    Filter(error="KeyError", died=True),
    Filter(error="-", died=True),
    Filter(since_ms=2, died=True),
    Filter(since_ms=5, until_ms=6, died=True),
    Filter(until_ms=5, died=True),
    Filter(since_ms=6, died=True),
    Filter(since_ms=2, until_ms=5),
    Filter(error="KeyError", reason="slow", died=True),
    Filter(error="KeyError", reason="rejected"),
]


@pytest.mark.parametrize("reverse", [False, True])
def test_pages_hold_each_dead_letter_that_matches_once(broker, reverse, monkeypatch):
    monkeypatch.setattr(module, "PART", 4)
    monkeypatch.setattr(module, "MOST_LOOKED_AT", 8)
    bury(broker, 30, random.Random(7))
    letters = list(broker.queue("q.dead").each())
    for wanted in FILTERS:
        expected = [each.message_id for each in letters if wanted.matches(each)]
        found = everything(broker.queue("q.dead"), wanted, reverse=reverse)
        assert [each.message.message_id for each in found] == (expected[::-1] if reverse else expected), wanted


@pytest.mark.parametrize("wanted", FILTERS, ids=repr)
def test_what_is_shown_is_what_is_replayed(broker, wanted):
    """The filter's predicate, and the conditions that the queue is given for an action, are the same."""
    bury(broker, 30, random.Random(7))
    shown = {each.message.message_id for each in everything(broker.queue("q.dead"), wanted)}
    assert broker.dead_letters("q.dead").replay(**wanted.conditions()) == len(shown)
    assert {each.message_id for each in broker.queue("q").each()} == shown


@pytest.mark.parametrize("seed", range(20))
def test_conditions_hold_for_what_matches_and_for_nothing_else(seed):
    chance = random.Random(seed)
    deaths = [
        Death(chance.choice(["q", "r"]), chance.choice(["rejected", "slow"]), 1, 5, details={"error_class": error})
        for error in chance.sample(ERRORS, chance.randrange(3))
    ]
    retried = {ATTEMPTS: _attempts([], chance.choice([KeyError("a: b"), None]))} if chance.random() < 0.5 else {}
    payload = envelope(chance.choice(TASKS), **retried)
    letter = Peeked(b"i" * 16, "q.dead", "ready", payload, "acme", 0, 1, 0, tuple(deaths), task_id="id-1")
    for wanted in FILTERS:
        conditions = wanted.conditions()
        where = conditions.pop("where", None)
        record = letter  # has the fields that are asked for
        held = LetterWalk("q.dead", b"", **conditions).matches(record) and (where is None or where(letter))
        assert held == wanted.matches(letter), (wanted, letter)


def test_what_a_death_tells_needs_no_payloads():
    wanted = Filter(since_ms=2, until_ms=5, error="KeyError", reason="slow", home="q", key="acme", died=True)
    assert "where" not in wanted.conditions()


@pytest.mark.parametrize(
    "wanted",
    [Filter(), Filter(key="acme"), Filter(reason="slow", home="q", died=True), Filter(since_ms=2, text="id-1")],
)
def test_headers_are_read_only_for_what_they_tell(wanted, monkeypatch):
    """A page without a filter looks at each message, too."""
    monkeypatch.delattr("kombu_fdb.engine.dead_letters.headers_of")
    letter = Peeked(b"i" * 16, "q.dead", "ready", b"", "acme", 0, 1, 0, (Death("q", "slow", 1, 5),), task_id="id-1")
    assert wanted.matches(letter)


def test_what_waits_to_be_retried_is_found_by_the_error_of_its_last_attempt(broker):
    """Any publisher may set these headers: a value that is not such a list has no error."""
    attempts = _attempts(_attempts([], ValueError("then")), ConnectionError("now: it is down"))
    told = [attempts, [], None, "builtins.ConnectionError: x", [5], [{"error": 5}], [{}], [{"error": "odd.: x"}]]
    due_ms = 2**41
    for each in told:
        publish(broker, Publication("", "q", envelope("shop.pay", **{ATTEMPTS: each}), due_ms=due_ms))
    for error, number in (("ConnectionError", 1), ("builtins.ConnectionError", 1), ("ValueError", 0), ("-", 6)):
        assert len(everything(broker.queue("q"), Filter(error=error), state="delayed")) == number, error


def test_a_task_is_found_by_the_name_that_its_publisher_gave_it_and_by_its_own(broker):
    """As the tasks of Django's, which are all run by one of Celery's."""
    publish(broker, *(Publication("", "q", envelope("django.run", shadow=each)) for each in ("shop.greet", None)))
    for wanted, found in (("shop.*", ["shop.greet"]), ("django.run", ["shop.greet", "django.run"])):
        matching, *_ = search(broker.queue("q"), Filter(task=wanted), 10)
        assert [MessageView.of(each, 0).title for each in matching] == found
        assert [MessageView.of(each, 0).as_json()["task"] for each in matching] == found


def test_moments(broker):
    publish(broker, Publication("", "q", b"x"))
    now_ms = next(broker.queue("q").each()).published_ms
    for wanted, number in (
        (Filter(since_ms=now_ms), 1),
        (Filter(since_ms=now_ms + 1), 0),
        (Filter(until_ms=now_ms), 0),
        (Filter(until_ms=now_ms + 1), 1),
    ):
        assert len(search(broker.queue("q"), wanted, 5)[0]) == number


@pytest.mark.parametrize("state", ["ready", "delayed", "leased"])
def test_messages_of_a_key_in_each_state(broker, state):
    due_ms = 2**41 if state == "delayed" else 0
    publish(broker, *(Publication("", "q", b"x", key=key, due_ms=due_ms) for key in ("", "a", "ab", "a", "")))
    if state == "leased":
        broker.queue("q").take_many(5)
    for key, number in (("a", 2), ("ab", 1), ("", 2), ("b", 0), (None, 5)):
        assert len(everything(broker.queue("q"), Filter(key=key), state=state)) == number


def test_a_filter_and_its_fields(broker):
    del broker
    for wanted in [*FILTERS, Filter(since_ms=1_700_000_000_001, until_ms=1_700_000_100_003)]:
        assert Filter.of(wanted.fields()) == wanted
        assert bool(wanted) == (str(wanted) != "")
    assert Filter.of({"since": "2026-01-02T03:04", "until": " ", "task": " a ", "page": "7"}) == Filter(
        task="a", since_ms=1_767_323_040_000
    )
    for text in ("yesterday", "2026-13-01", "9" * 400):
        with pytest.raises(InvalidArgument, match="date and time"):
            Filter.of({"since": text})


# -- costs -------------------------------------------------------------------------------------------------------------


def fill(broker, number, task="shop.charge"):
    for start in range(0, number, 1_000):
        batch = [
            Publication("", "q", envelope(task), key=f"k{each:06}") for each in range(start, min(start + 1_000, number))
        ]
        publish(broker, *batch)
    broker._engine.upkeep.flush_totals()


@pytest.mark.parametrize("number", [3_000, 12_000])
def test_a_page_that_finds_nothing_reads_a_bounded_part_and_says_where_to_go_on(broker, counted, number):
    fill(broker, number)
    found = []
    paid = cost(counted, lambda: found.append(search(broker.queue("q"), Filter(task="rare"), 50)))
    ((matching, looked_at, following),) = found
    assert (matching, looked_at) == ([], 2_050)
    assert following is not None
    assert (paid.rows, paid.point_reads, paid.commits) == (51 + 10 * 201, 0, 0)
    assert len(counted.transactions) == 11


@pytest.mark.parametrize("number", [300, 12_000])
def test_pages_cost_the_same_in_a_queue_of_any_length(broker, counted, number):
    fill(broker, number)
    paid = cost(counted, lambda: search(broker.queue("q"), Filter(), 50))
    assert (paid.rows, paid.point_reads, paid.commits) == (51, 0, 0)
    paid = cost(counted, lambda: search(broker.queue("q"), Filter(key="k000007"), 50))
    assert (paid.rows, paid.range_reads, paid.commits) == (2, 4, 0)  # the key's backlog; its message
    paid = cost(counted, lambda: find_keys(broker, "q", 20, prefix="k0000"))
    assert (paid.rows, paid.range_reads, paid.commits) == (21, 3, 0)


@pytest.mark.parametrize("number", [1_500, 6_000])
def test_groups_read_the_first_letters_only_and_say_so(broker, counted, number):
    fill(broker, number)
    found = []
    paid = cost(counted, lambda: found.extend([group(broker, ["q"], most=1_000), letters_in(broker, ["q"])]))
    assert (found[0][1:], found[1]) == ((1_000, False), number)
    assert (paid.rows, paid.commits) == (2 * 501 + 1, 0)  # letters; the queue's counter


# -- groups and keys ---------------------------------------------------------------------------------------------------


def test_groups_by_what_they_died_of(broker):
    bury(broker, 40, random.Random(7))
    groups, counted, is_whole = group(broker, ["q.dead"])
    assert (counted, letters_in(broker, ["q.dead"]), is_whole) == (40, 40, True)
    assert sum(each.count for each in groups) == 40
    assert [each.count for each in groups] == sorted((each.count for each in groups), reverse=True)
    for each in groups:
        letters = [letter for letter in broker.queue("q.dead").each() if each.filter.matches(letter)]
        assert len(letters) == each.count
        times = [letter.deaths[0].time_ms for letter in letters]
        assert (each.first_ms, each.last_ms) == (min(times), max(times))
        example = broker.queue("q.dead").at(each.example)
        assert each.filter.matches(example.message)
    groups, counted, _ = group(broker, ["q.dead"], Filter(reason="slow"))
    assert {each.reason for each in groups} == {"slow"}
    assert counted == 40


def test_a_queue_without_letters_has_no_groups(broker):
    assert group(broker, ["nobody.dead"]) == ([], 0, True)
    assert letters_in(broker, ["nobody.dead"]) == 0


def test_keys_by_prefix_in_pages(broker):
    for key in ("acme-1", "acme-2", "acme-3", "zoo"):
        broker.queue("q").put("x", key=key)
    broker.queue("q").limit("acme-2", weight=3, paused=True)
    broker.queue("q").limit("acme-9", rate=2)
    first, following = find_keys(broker, "q", 2, prefix="acme")
    assert ([*first], following) == (["acme-1", "acme-2"], "acme-2")
    assert first["acme-2"].limits == KeyLimits(weight=3, paused=True)
    second, last = find_keys(broker, "q", 2, prefix="acme", after=following)
    assert ([*second], last) == (["acme-3", "acme-9"], None)
