"""From a request to a run: hostile messages, masking, options; and what ``install`` does with the history."""

import re
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.exceptions import Retry
from hypothesis import given
from hypothesis import strategies as st

from celery_fdb import History, install
from celery_fdb.history.layout import RunGroup, pack_groups
from celery_fdb.history.recorder import HistoryRequest, Keeper, error_of, facts_of, run_of, weight_of
from celery_fdb.history.run import Run
from kombu_fdb.errors import OptionError
from kombu_fdb.primitives import masking
from kombu_fdb.primitives.masking import MASK, masked_text

NOW_MS = 1_800_000_000_000


def made(state="SUCCESS", exc=None, traceback=None, options=None, **given_facts):
    headers = {"id": "t", "root_id": "t", "retries": 0, **given_facts.pop("headers", {})}
    request = SimpleNamespace(
        _request_dict=headers,
        _message=SimpleNamespace(delivery_info={"queue": "q"}),
        name="shop.pay",
        _hostname="w@h",
        _argsrepr="(1,)",
        _kwargsrepr="{}",
        _payload=((1,), {}, {}),
        time_start=NOW_MS / 1000 - 2,
    )
    vars(request).update(given_facts)
    facts = facts_of(request, state, NOW_MS, 0.5, error_of(exc, traceback))
    assert weight_of(facts) < 20_000, "what waits is bounded"
    assert len(repr(facts)) < 200_000
    return run_of(facts, options or History())


def stored(run):
    """As it comes back."""
    ((found,),) = [RunGroup.decode(group.value) for group in pack_groups([run])]
    return found


def test_what_most_runs_have():
    run = made()
    assert run == Run("t", "shop.pay", "q", "w@h", "SUCCESS", NOW_MS - 2000, NOW_MS - 1500, 0.5, "(1,)", "{}")


def test_the_key_is_that_of_the_message_wherever_it_came_from():
    """A header ``fair_key`` stands in the message; another key, as by ``MessageGroupId``, in the delivery."""
    assert made(headers={"fair_key": "acme"}).key == "acme"
    assert made(_message=SimpleNamespace(delivery_info={"queue": "q", "fair_key": "acme"})).key == "acme"


@pytest.mark.parametrize(
    ("headers", "moments"),
    [
        ({"fdb_published": NOW_MS - 9, "eta": "2027-01-15T08:00:00+00:00"}, (NOW_MS - 9, 1_800_000_000_000)),
        ({"eta": "2027-01-15T08:00:00"}, (0, 1_800_000_000_000)),
        ({"fdb_published": "soon", "eta": "soon"}, (0, 0)),
        ({"fdb_published": -1, "eta": 5}, (0, 0)),
        ({"fdb_published": 2**80, "eta": "0001-01-01T00:00:00+23:59"}, (0, 0)),
        ({"fdb_published": True, "eta": "9" * 100_000}, (0, 0)),
    ],
)
def test_when_it_was_published_and_due(headers, moments):
    run = made(headers=headers)
    assert (run.published_ms, run.due_ms) == moments
    assert stored(run) == run


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("x" * 10_000_000),
        ValueError("\ud800" * 5000),
        Unprintable(),
        ValueError("\x00" * 5000),
        "reason" * 9999,
    ],
    ids=["huge", "surrogates", "unprintable", "control", "text"],
)
def test_hostile_errors(exc):
    run = made("FAILURE", exc, "secret line\n" * 1_000_000)
    assert len(run.error) <= 2000
    assert len(run.traceback) <= 4096
    assert stored(run)


HOSTILE = [None, 5, -1, 2**80, 1.5, float("nan"), True, b"\xff", "", "x" * 100_000, "\ud800", [], {"a": 1}]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_hostile_headers(value):
    names = ("id", "root_id", "parent_id", "group", "fair_key", "retries", "x-delivery-count")
    for name in names:
        assert stored(made(headers={name: value}))
    everywhere = dict.fromkeys(("name", "_hostname", "_argsrepr", "_kwargsrepr", "time_start"), value)
    assert stored(made(headers=dict.fromkeys(names, value), **everywhere))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(embed=json_values, signature=json_values)
def test_hostile_canvas(embed, signature):
    for each in (embed, {"chain": signature, "chord": embed}, {"chain": [signature]}, {"chord": {"options": embed}}):
        assert stored(made(_payload=((), {}, each)))
    assert stored(made(_payload=embed))


def test_what_follows_is_bounded():
    chain = [{"task": f"s{number}", "options": {"task_id": f"i{number}"}} for number in range(100, 0, -1)]
    run = made(_payload=((), {}, {"chain": chain, "chord": None}))
    assert run.followers[:2] == (("i1", "s1"), ("i2", "s2"))
    assert len(run.followers) == 20


def test_a_retry_names_its_cause():
    run = made("RETRY", Retry(exc=KeyError("k")))
    assert (run.error_class, run.error) == ("builtins.KeyError", "'k'")
    assert made("RETRY", Retry("later")).error_class == "celery.exceptions.Retry"


def test_a_clock_that_jumped():
    assert made(time_start=NOW_MS / 1000 + 3600).end_ms == NOW_MS
    assert made(time_start=1e30).start_ms == 0


# -- privacy -----------------------------------------------------------------------------------------------------------


def test_arguments_by_option():
    facts = {"_argsrepr": "('x', {'password': 'hunter2'})", "_kwargsrepr": "{'api_key': 'k'}"}
    masked = made(**facts)
    assert "hunter2" not in masked.args
    assert masked.kwargs == "{'api_key': " + MASK + "}"
    assert made(options=History(arguments="full"), **facts).args == facts["_argsrepr"]
    hidden = made(options=History(arguments="none"), **facts)
    assert (hidden.args, hidden.kwargs) == ("", "")


def test_errors_and_tracebacks_are_masked():
    run = made("FAILURE", ValueError("token=abc123"), "  connect('redis://u:hunter2@h')\nValueError: token=abc123")
    assert "abc123" not in run.error + run.traceback
    assert "hunter2" not in run.traceback
    assert made("FAILURE", ValueError("x"), "trace", History(tracebacks=False)).traceback == ""


#: Each word of the masking, as people write it.
NAMES = {
    re.sub(r"\(.*?\)", "", word).replace("_?", between) for word in masking._WORDS for between in ("", "_", "-", " ")
}


def test_no_secret_is_missed_for_want_of_a_hint():
    """The quick look for a hint never decides otherwise than the masking would."""
    for text in (*(f"{name}='x1y2z3'" for name in sorted(NAMES)), "amqp://u:x1y2z3@h"):
        assert "x1y2z3" not in masked_text(text)
        assert "x1y2z3" not in made(_argsrepr=text).args + made(_argsrepr=text.upper()).args.lower()


# -- options and install -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"runs": 5}, {"runs": 10**9}, {"runs": "many"}, {"max_age": 0}, {"max_age": float("nan")}, {"max_age": 10**12},
     {"arguments": "all"}, {"arguments": True}, {"tracebacks": "yes"}, {"tracebacks": []},
     {"tracebacks": 1}],
    ids=str,
)  # fmt: skip
def test_senseless_bounds(options):
    with pytest.raises(OptionError, match="It takes"):
        History(**options)


@pytest.mark.parametrize("given_history", ["yes", 5, {"runs": 500}])
def test_senseless_histories(given_history):
    with pytest.raises(OptionError, match=r"celery_fdb\.History"):
        install(Celery("x", set_as_current=False), history=given_history)


def keepers(app):
    return [each for each in app.steps["consumer"] if isinstance(each, type) and issubclass(each, Keeper)]


def test_install_keeps_one_history_with_the_last_bounds():
    app = Celery("x", set_as_current=False)
    assert keepers(install(app)) == []
    assert keepers(install(app, history=False)) == []
    install(app, history=True)
    install(app, history=History(runs=500))
    (keeper,) = keepers(install(app))
    assert keeper.recorder.bounds.runs == 500


def test_an_error_of_ours_never_reaches_the_task():
    class Request(HistoryRequest):
        recorder = install_recorder()

    request = Request()  # has nothing of what is read
    request.note("SUCCESS")
    assert Request.recorder._untold == 1


def install_recorder():
    app = install(Celery("x", set_as_current=False), history=True)
    return keepers(app)[0].recorder
