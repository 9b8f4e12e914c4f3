"""The options in a task's decorator, over the ways a task is published."""

from __future__ import annotations

from itertools import cycle
from typing import ClassVar

import pytest
from celery import Celery, Task, chain, chord, group
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Retry
from kombu import Exchange, Queue

from celery_fdb import FdbTask, install
from celery_fdb.tasks import failures
from celery_fdb.tasks.task import KNOWN_S, _known
from kombu_fdb import InvalidArgument, OptionError
from kombu_fdb.model import KeyLimits
from kombu_fdb.testing.clock import ManualClock


def define(app, **options):
    @app.task(name="charge", shared=False, **{"acks_late": True, **options})
    def charge(customer_id, order_id=0):
        return order_id

    return app.tasks["charge"]


def keys(messages):
    return [headers.get("fair_key") for _, _, _, headers in messages]


# -- fair keys --------------------------------------------------------------------------------------------------------

WAYS = {
    "delay": lambda task: task.delay("acme", 1),
    "delay with keywords": lambda task: task.delay(order_id=1, customer_id="acme"),
    "apply_async": lambda task: task.apply_async(("acme",), countdown=0),
    "signature": lambda task: task.s("acme").apply_async(),
    "partial signature": lambda task: task.s(1).apply_async(("acme",)),
    "signature that was JSON": lambda task: task.app.signature(dict(task.s("acme"))).apply_async(),
    "chain": lambda task: chain(task.si("acme"), task.si("other")).apply_async(),
    "group": lambda task: group([task.s("acme")]).apply_async(),
    "chord": lambda task: chord([task.s("acme"), task.s("acme")])(task.si("other")),
}


@pytest.mark.parametrize("way", WAYS)
def test_fair_key_is_an_argument_whatever_way_it_is_published(app, sent, way):
    WAYS[way](define(app, fair_key="customer_id"))
    found = keys(sent())
    assert found
    assert set(found) == {"acme"}


def test_fair_key_is_a_function_of_args_and_kwargs(app, sent):
    define(app, fair_key=lambda args, kwargs: f"{args[0]}/{kwargs['order_id']}").delay("acme", order_id=7)
    assert keys(sent()) == ["acme/7"]


def test_an_explicit_key_comes_first(app, sent):
    task = define(app, fair_key="customer_id")
    task.apply_async(("acme",), fair_key="globex")
    task.s("acme").set(fair_key="initech").delay()
    task.apply_async(("acme",), headers={"fair_key": "hooli", "other": 1}, fair_key="no")
    assert keys(sent()) == ["globex", "initech", "hooli"]


def test_a_function_in_task_annotations_is_one_of_args_and_kwargs(app, sent):
    app.conf.task_annotations = {"charge": {"fair_key": lambda args, _: f"c/{args[0]}"}}
    define(app).delay("acme")
    assert keys(sent()) == ["c/acme"]


def test_an_argument_named_for_all_tasks_is_the_key_of_those_that_have_it(app, sent):
    app.conf.task_annotations = {"*": {"fair_key": "order_id"}}

    @app.task(name="other", shared=False)
    def other(): ...

    app.tasks["other"].delay()
    define(app).delay("acme", order_id="7")
    assert keys(sent()) == [None, "7"]


def test_no_value_is_no_key(app, sent):
    define(app, fair_key="customer_id").delay(None)
    assert keys(sent()) == [None]


def test_a_function_that_fails_publishes_nothing(app, broker):
    with pytest.raises(ZeroDivisionError):
        define(app, fair_key=lambda args, kwargs: 1 / 0).delay("acme")
    assert broker.queue("q").count() == 0


def test_a_retry_has_the_key_of_a_property_too(app, sent):
    define(app).apply_async(("a",), MessageGroupId="acme")
    ((_, args, kwargs, headers),) = sent()
    task, own = app.tasks["charge"], {"fair_key": headers["fair_key"]}
    task.push_request(id="i", args=args, kwargs=kwargs, headers=own, called_directly=False)
    with pytest.raises(Retry):
        task.retry(countdown=0)
    assert keys(sent()) == ["acme"]


def test_a_stamp_with_the_name_of_a_property_is_no_key(app, sent):
    signature = define(app).s("a")
    signature.stamp(MessageGroupId=["x", "y"])
    signature.apply_async()
    assert keys(sent()) == [None]


def test_a_retry_keeps_the_key_of_the_first_attempt(app, sent):
    task = define(app, fair_key="customer_id", max_in_flight=1)
    task.apply_async(("acme",), fair_key="explicit")
    ((_, args, kwargs, headers),) = sent()
    request = {**headers, "args": args, "kwargs": kwargs, "called_directly": False}
    task.push_request(**request, headers={"fair_key": headers["fair_key"]})
    with pytest.raises(Retry):
        task.retry(countdown=0)
    assert keys(sent()) == ["explicit/charge"]


# -- limits -----------------------------------------------------------------------------------------------------------


def test_max_in_flight_holds_for_each_key_of_the_task(app, broker):
    task = define(app, fair_key="customer_id", max_in_flight=1)
    for customer in "aab":
        task.delay(customer)
    taken = broker.queue("q").take_many(10, 0)
    assert sorted(job.key for job in taken) == ["a/charge", "b/charge"]


def test_max_in_flight_needs_late_acks(app):
    """Celery acknowledges any other task when it begins, so nothing would be counted."""
    with pytest.raises(OptionError, match="Add acks_late=True"):
        define(app, max_in_flight=1, acks_late=False)


def test_late_acks_of_the_whole_app_do(app):
    app.conf.task_acks_late = True

    @app.task(name="mail", max_in_flight=1, shared=False)
    def mail():
        pass

    assert app.tasks["mail"].limits == {"max_in_flight": 1}


class Own(Task):
    """An application's, that knows nothing of us."""

    abstract = True
    given: ClassVar[list[object]] = []

    def apply_async(self, args=None, kwargs=None, **options):
        self.given.append(args)
        return super().apply_async(args, kwargs, **options)


def test_a_task_with_a_base_of_its_own_has_the_options(app, sent):
    Own.given.clear()
    task = define(app, base=Own, fair_key="customer_id", max_in_flight=1, backoff="processing-queue")
    assert isinstance(task, Own)
    assert isinstance(task, FdbTask)
    task.delay("acme")
    assert keys(sent()) == ["acme/charge"]
    assert Own.given == [("acme",)]


def test_a_misspelt_option_of_such_a_task_is_an_error(app):
    with pytest.raises(OptionError, match="Did you mean max_in_flight"):
        define(app, base=Own, max_inflight=1)


def test_a_registered_class_that_can_not_have_the_options_is_refused(app):
    class Charge(Task):
        name = "old"
        fair_key = "customer_id"

    for given in (Charge, Charge()):
        with pytest.raises(OptionError, match="Derive its class"):
            app.register_task(given)
    assert "old" not in app.tasks


def test_without_a_key_the_limit_is_of_the_whole_task(app, broker):
    task = define(app, max_in_flight=2)
    for _ in range(3):
        task.delay("a")
    assert len(broker.queue("q").take_many(10, 0)) == 2


def by_tenant(task, args, kwargs, headers):
    return f"{kwargs['customer']}-{task}"


@pytest.mark.parametrize(
    ("option", "call", "key"),
    [
        (None, {"MessageGroupId": "acme"}, "acme/t"),
        (None, {"headers": {"MessageGroupId": "acme"}}, "acme/t"),
        ("tenant", {"headers": {"tenant": "acme"}}, "acme/t"),
        ("tenant", {"headers": {"tenant": "acme"}, "fair_key": "own"}, "own/t"),
        (f"{__name__}:by_tenant", {"kwargs": {"customer": "acme"}}, "acme-t/t"),
    ],
)
def test_a_limit_is_of_the_key_that_the_transport_finds(app, broker, option, call, key):
    app.conf.broker_transport_options = {"fair_key": option}

    @app.task(name="t", base=FdbTask, max_in_flight=1, acks_late=True)
    def task(customer=""): ...

    task.apply_async(**call)
    assert {name: counts.limits.max_in_flight for name, counts in broker.queue("q").keys().items()} == {key: 1}


def test_two_tasks_with_different_limits_share_a_queue_and_a_customer(app, broker):
    one = define(app, fair_key="customer_id", max_in_flight=1)

    @app.task(
        name="mail", fair_key="customer_id", max_in_flight=2, rate_limit_key="100/m", acks_late=True, shared=False
    )
    def mail(customer_id):
        pass

    one.delay("a")
    app.tasks["mail"].delay("a")
    limits = {key: each.limits for key, each in broker.queue("q").keys().items()}
    assert limits == {"a/charge": KeyLimits(max_in_flight=1), "a/mail": KeyLimits(max_in_flight=2, rate=100 / 60)}


def test_a_changed_number_takes_effect_and_other_limits_of_the_key_stay(app, url, broker):
    define(app, fair_key="customer_id", max_in_flight=1).delay("a")
    queue = broker.queue("q")
    queue.limit("a/charge", weight=3)
    _known.clear()  # another process
    newer = install(Celery("newer", broker=url, set_as_current=False))
    newer.conf.task_default_queue = "q"
    define(newer, fair_key="customer_id", max_in_flight=5).delay("a")
    newer.close()
    assert queue.keys()["a/charge"].limits == KeyLimits(max_in_flight=5, weight=3)


TOPICS = {"task_default_exchange_type": "topic", "task_create_missing_queue_exchange_type": "topic"}
MONEY = Queue("money", Exchange("shop", type="topic"), routing_key="money")
#: The app's configuration, the task's options and those of the call that lead to the queue ``money``.
WAYS_TO_MONEY = {
    "the task's route": ({"task_routes": {"charge": {"queue": "money"}}}, {}, {}),
    "the route of another name": (
        {"task_routes": {"vip": {"queue": "money"}, "charge": {"queue": "mail"}}},
        {},
        {"route_name": "vip"},
    ),
    "the task's queue": ({}, {"queue": "money"}, {}),
    "the task's exchange": ({}, {"exchange": "shop", "routing_key": "money"}, {}),
    "the call's routing key": (TOPICS, {}, {"exchange": "", "routing_key": "money"}),
    "the call's queue": (TOPICS, {}, {"queue": "money", "exchange_type": "direct"}),
    "a queue that is not yet bound to its exchange": ({"task_queues": [MONEY]}, {}, {"queue": "money"}),
}


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
@pytest.mark.parametrize("way", WAYS_TO_MONEY)
def test_limits_are_set_where_the_message_goes(app, broker, way):
    conf, options, call = WAYS_TO_MONEY[way]
    app.conf.update(conf)
    if "task_queues" not in conf:
        with app.connection_for_write() as connection:
            MONEY(connection).declare()
    define(app, max_in_flight=1, **options).apply_async(("a",), **call)
    assert broker.queue("money").stats().ready == 1
    assert broker.queue("money").keys()["charge"].limits == KeyLimits(max_in_flight=1)


def test_limits_are_set_where_a_router_sends_this_very_message(app, broker):
    ways = cycle(["money", "mail"])
    app.conf.task_routes = lambda *_, **__: {"queue": next(ways)}
    define(app, max_in_flight=1).delay("a")
    assert broker.queue("money").keys()["charge"].limits == KeyLimits(max_in_flight=1)
    assert broker.queue("money").stats().ready == 1


def test_a_known_key_costs_no_look_at_its_limits(app, monkeypatch):
    task = define(app, max_in_flight=1)
    task.delay("a")
    monkeypatch.setattr("celery_fdb.tasks.task._limit", lambda *args: pytest.fail("looked again"))
    task.delay("a")


def declare_anew(app, broker):
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete("q")
    broker.declare("q")


def test_limits_that_were_changed_since_stay(app, broker, monkeypatch):
    """By newer code while processes with the old one go on, or by a person."""
    clock = ManualClock()
    monkeypatch.setattr("celery_fdb.tasks.task._clock", clock)
    task = define(app, max_in_flight=1)
    task.delay("a")
    broker.queue("q").limit("charge", max_in_flight=5)
    for _ in range(2):
        clock.advance(KNOWN_S)
        task.delay("a")
    assert broker.queue("q").limits("charge") == KeyLimits(max_in_flight=5)
    declare_anew(app, broker)
    broker.queue("q").limit_every_key(max_in_flight=9)
    clock.advance(KNOWN_S)
    task.delay("a")
    assert broker.queue("q").limits("charge") == KeyLimits(max_in_flight=1)


def test_a_queue_that_was_declared_anew_gets_the_limits_beside_others(app, broker, monkeypatch):
    """Such as the rate of another task with the same key, or a pause."""
    clock = ManualClock()
    monkeypatch.setattr("celery_fdb.tasks.task._clock", clock)
    task = define(app, max_in_flight=1)
    task.delay("a")
    declare_anew(app, broker)
    broker.queue("q").limit("charge", rate=10.0, paused=True)
    clock.advance(KNOWN_S)
    task.delay("a")
    assert broker.queue("q").limits("charge") == KeyLimits(max_in_flight=1, rate=10.0, paused=True)


# -- dedup ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        {"headers": {"x-deduplication-id": "x"}},
        {"MessageDeduplicationId": "x"},
        {"headers": {"dedup_id": "x"}},
        {"dedup_id": "x"},
    ],
)
def test_a_window_is_of_the_dedup_id_whatever_it_is_called(app, sent, call):
    task = define(app)
    for _ in range(2):
        task.apply_async(("acme",), dedup_window=9, **call)
    ((*_, headers),) = sent()
    assert headers["dedup_window"] == 9


def test_a_dedup_id_publishes_once(app, sent):
    task = define(app, dedup_id="order_id", dedup_window=60)
    for _ in range(2):
        task.delay("acme", order_id=7)
    task.delay("acme", order_id=8)
    assert [headers["dedup_id"] for *_, headers in sent()] == ["charge:7", "charge:8"]


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_retry_is_no_duplicate(app, broker, protocol):
    app.conf.task_protocol = protocol
    task = define(app, dedup_id="customer_id")
    task.delay("a")
    task.push_request(id="i", args=("a",), kwargs={}, headers={"dedup_id": "charge:a"}, called_directly=False)
    with pytest.raises(Retry):
        task.retry(countdown=0)
    assert broker.queue("q").stats().ready == 2


REPLACEMENTS = {
    "itself": lambda again, _other: again,
    "a chain that ends in it": lambda again, other: chain(other, chain(other, again)),
    "a chord with it as body": lambda again, other: chord([other, other], again),
    "a chord with it behind its body": lambda again, other: chord([other, other], chain(other, again)),
    "a chord without a header": lambda again, other: chain(other, chord([], again)),
    "a group": lambda _again, other: group(other, other),
}


@pytest.mark.parametrize("way", REPLACEMENTS)
def test_a_replaced_task_is_no_duplicate_and_what_is_behind_it_may_be_one(app, way):
    runs = []

    @app.task(name="replaced", bind=True, dedup_id="order_id", shared=False)
    def replaced(self, order_id):
        runs.append(order_id)
        if runs.count(order_id) > 1:
            return order_id
        raise self.replace(REPLACEMENTS[way](replaced.si(order_id), app.tasks["charge"].si("acme")))

    @app.task(name="behind", dedup_id="order_id", shared=False)
    def behind(_result, order_id):
        runs.append(order_id)
        return order_id

    define(app)
    with start_worker(app, perform_ping_check=False, pool="solo", shutdown_timeout=20):
        for order_id in (1, 2):
            result = chain(replaced.si(order_id), behind.s(order_id=7)).delay()
            assert result.parent.get(timeout=20) == (order_id if way != "a group" else [0, 0])
        last = chain(replaced.si(3), behind.s(order_id=8)).delay()
        assert last.get(timeout=20) == 8
    assert runs.count(1) == runs.count(2) == (2 if way != "a group" else 1)
    assert runs.count(7) == 1


def test_a_stamp_with_the_name_of_an_option_is_a_stamp(app, sent):
    signature = define(app).s("a")
    signature.stamp(fair_key="x", dedup_id="x", dedup_window="x")
    signature.apply_async()
    ((_, _, _, headers),) = sent()
    assert headers["stamps"].keys() == {"fair_key", "dedup_id", "dedup_window"}
    assert headers.keys().isdisjoint(headers["stamps"])


# -- dead letters and backoff -----------------------------------------------------------------------------------------


def test_the_option_without_install_is_enough():
    app = Celery("shop", broker="memory://", set_as_current=False)

    @app.task(base=FdbTask, name="one", shared=False)
    def one():
        pass

    assert app.tasks["one"].dead_letter is None
    assert failures.FailureStep not in app.steps["consumer"]

    @app.task(base=FdbTask, name="two", shared=False, dead_letter=True)
    def two():
        pass

    assert app.tasks["two"].dead_letter
    assert failures.FailureStep in app.steps["consumer"]
    app.close()


@pytest.mark.parametrize(
    ("backoff", "retries", "given", "seconds"),
    [
        ("processing-queue", 0, {}, 60),
        ("processing-queue", 2, {}, 1500),
        ("10/30s", 1, {}, 30),
        ("10/30s", 9, {}, 30),
        ("1/5/25min", 0, {"countdown": 3}, 3),
        ("processing-queue", 0, [("b",), {}, None, True, None, 7, 5], 7),
    ],
    ids=str,
)
def test_retry_waits_as_long_as_the_backoff_says_unless_a_countdown_is_given(app, backoff, retries, given, seconds):
    """Also by its position, as Celery's ``retry`` takes it."""
    task = define(app, backoff=backoff, max_retries=None)
    task.push_request(id="i", args=("a",), kwargs={}, retries=retries, called_directly=False)
    with pytest.raises(Retry) as raised:
        task.retry(**given) if isinstance(given, dict) else task.retry(*given)
    assert raised.value.when == seconds


# -- bad input --------------------------------------------------------------------------------------------------------


WRONG_OPTIONS = [
    ({"fairkey": "customer_id"}, "Did you mean fair_key?"),
    ({"max_inflight": 1}, "Did you mean max_in_flight?"),
    ({"fair_key": 7}, "the name of an argument"),
    ({"max_in_flight": 0}, "a whole number of at least 1"),
    ({"max_in_flight": True}, "a whole number of at least 1"),
    ({"max_in_flight": "2"}, "a whole number of at least 1"),
    ({"rate_limit_key": "often"}, "10/s"),
    ({"dedup_window": -1}, "a number of seconds"),
    ({"dead_letter": "yes"}, "True or False"),
    ({"dead_letter": []}, "True or False"),
    ({"dead_letter": 1}, "True or False"),
    ({"backoff": "procesing-queue"}, "Did you mean processing-queue?"),
    ({"backoff": "soon"}, "pauses and a unit"),
]
#: Annotations may be of many tasks, not all of which have the argument.
WRONG_ARGUMENTS = [
    ({"fair_key": "customer"}, "Did you mean customer_id?"),
    ({"dedup_id": "zzz"}, "Its arguments: customer_id, order_id."),
]


@pytest.mark.parametrize(
    ("options", "text", "annotated"),
    [
        *((*each, False) for each in WRONG_OPTIONS + WRONG_ARGUMENTS),
        *((*each, True) for each in WRONG_OPTIONS),
    ],
)
def test_a_wrong_option_names_the_fix(app, options, text, annotated):
    """In the decorator, and in ``task_annotations``."""
    if annotated:
        app.conf.task_annotations, options = {"charge": options}, {}
    with pytest.raises(InvalidArgument) as raised:
        define(app, **options)
    assert text in str(raised.value)


def test_attributes_of_your_own_are_yours(app):
    assert define(app, owner="billing", keys=3, rate_limit="1/s").owner == "billing"


# -- install ----------------------------------------------------------------------------------------------------------


class OwnTask(Task):
    own = 1


def test_install_keeps_a_task_class_of_your_own():
    app = install(Celery(task_cls=OwnTask, set_as_current=False))
    task = define(app, fair_key="customer_id")
    assert isinstance(task, OwnTask)
    assert isinstance(task, FdbTask)
    assert type(app.control).__module__ == "celery_fdb.control"


def test_install_twice_is_install_once():
    app = install(install(Celery(set_as_current=False)))
    assert isinstance(define(app), FdbTask)


def test_install_after_the_first_task_is_an_error():
    app = Celery(set_as_current=False)
    define(app)
    with pytest.raises(InvalidArgument, match="right after"):
        install(app)


def test_install_of_what_is_no_app_is_an_error():
    with pytest.raises(InvalidArgument, match=r"not a Celery app \(given: 'shop'\).*Pass the app itself"):
        install("shop")


def test_another_broker_ignores_limits(app):
    other = install(Celery(broker="memory://", set_as_current=False))
    define(other, max_in_flight=1, fair_key="customer_id").delay("acme")
    other.close()


def test_eager_tasks_run_as_ever():
    app = install(Celery(set_as_current=False))
    app.conf.task_always_eager = True
    assert define(app, max_in_flight=1, fair_key="customer_id", dedup_id="order_id").delay("acme", 3).get() == 3
