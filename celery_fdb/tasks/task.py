"""The base class of tasks: fairness, limits, dedup, dead letters and backoff, as options of its decorator.

Backoff: retries by a named schedule. ``backoff="processing-queue"`` waits 1, 5 and 25 minutes before the next attempts.

The names are those of :mod:`kombu_fdb.api.job`. A retried task waits in the store, not in a worker. If a task sets its
own pause (``countdown``, ``eta``, or Celery's ``retry_backoff``), that one applies.

Limits: a task's limits are written into the store for each key it is published to.

The process remembers for a minute which keys have them, so a publish to a known key costs nothing more. Then it looks
again: the queue may have been deleted and declared anew, and another store has other limits. A key that has the task's
limits already costs one read; a new key, or a changed number, one write. If a key's limits have changed since the
process set them, by newer code or by a person, they stay: two versions of the code would undo each other's.

Options:

::

    @app.task(base=FdbTask, fair_key="customer_id", max_in_flight=1, acks_late=True)
    def charge(customer_id, order_id): ...

================== ===================================================================================================
``fair_key``       on whose behalf it runs: the name of an argument, or a function of ``(args, kwargs)``. Becomes the
                   message's header ``fair_key``
``max_in_flight``  how many of this task's messages with one key may run at a time, across all workers. Needs
                   ``acks_late``
``rate_limit_key`` how often they may start, as ``"10/s"``, ``"100/m"`` or ``"5/h"``, across all workers
``dedup_id``       identifies duplicate calls: an argument's name or a function, as above. Becomes the header
                   ``dedup_id``, after the task's name
``dedup_window``   for how many seconds; when unset, the broker's option of that name
``dead_letter``    whether a task that fails for good goes to the dead letters of its queue (``failures.py``); when
                   unset, the app's ``fdb_dead_letter_failures`` decides
``backoff``        how long ``retry`` waits: ``"processing-queue"`` (1, 5, 25 minutes), ``"1/5/25min"``, ``"10/30s"``
================== ===================================================================================================

You can also pass ``fair_key`` and the dedup options to ``apply_async`` or ``Signature.set``, as values:
``charge.apply_async((7,), fair_key="acme", dedup_id="order-7")``. A header of that name takes precedence. The options
apply to everything that goes through ``apply_async``: ``delay``, signatures, canvas, ``retry`` and beat. They don't
apply to ``app.send_task("name")``, which doesn't know the names of arguments.

The store keeps limits for a key of a queue. So that two tasks with different limits can share a queue and a customer,
the key of a limited task is ``<fair key>/<task name>``, or the task's name alone: the customer still has one turn per
round (the two levels of :mod:`kombu_fdb.engine.scheduling.fair`), and each of its tasks has its own limit. A changed
number takes effect as soon as a process with the new code publishes to the key, and a key's other limits stay as they
are. If you remove a limit from the code, remove it from the store as well (``Queue.unlimit``).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Task
from celery.canvas import _chain, chord, group
from kombu.common import Broadcast

from celery_fdb.tasks import failures
from kombu_fdb import Broker
from kombu_fdb.api.job import backoff_s as seconds
from kombu_fdb.api.queue import Queue
from kombu_fdb.engine.scheduling.limit_changes import LIMIT_KINDS
from kombu_fdb.errors import KombuFDBError, OptionError
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.ranges import FLAG, LONGEST_S, SHORTEST_S, Kind, rate_of, refused
from kombu_fdb.transport.channel import Channel
from kombu_fdb.transport.envelope import DEDUP_IDS, text_of
from kombu_fdb.transport.errors import raise_as_amqp
from kombu_fdb.transport.fairkey import key_reader
from kombu_fdb.transport.worker import OPTIONS

# -- backoff -----------------------------------------------------------------------------------------------------------


class Backoff:
    """Mixed into a task class: gives tasks the option ``backoff``, for ``self.retry()`` and ``autoretry_for``."""

    backoff: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises ``OptionError`` for an unknown schedule when the task is made, not when it first fails."""
        super().__init_subclass__(**options)
        if cls.backoff is not None:
            seconds(cls.backoff, 1)

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Any = None,
        throw: Any = True,
        eta: Any = None,
        countdown: float | None = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """As Celery's ``retry``; without ``eta`` and ``countdown``, after the schedule's pause."""
        if eta is None and countdown is None and self.backoff is not None:
            countdown = seconds(self.backoff, self.request.retries + 1)  # type: ignore[attr-defined]  # of the task
        return super().retry(args, kwargs, exc, throw, eta, countdown, *rest, **options)  # type: ignore[misc]  # a mixin


# -- limits ------------------------------------------------------------------------------------------------------------


#: Keys remembered at most, and for how many seconds; a forgotten one is read again.
MOST_KEYS, KNOWN_S = 10_000, 60.0

_clock = Clock()
_known: dict[tuple[str, str, str], tuple[float, Mapping[str, Any]]] = {}

#: The options that say where a task goes.
DESTINATION = ("queue", "exchange", "exchange_type", "routing_key")


def routed(task: Task, args: Any, kwargs: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options with the destination in them, as Celery finds it: from the call, the task's attributes, and routes.

    Celery asks its routers once more, and puts this destination first: a router may name another queue at each call.
    """
    given = {**task._get_exec_options(), **options}
    router, name = options.get("router") or task.app.amqp.router, options.get("route_name") or task.name
    route = router.route(given, name, args or (), kwargs or {}, task)
    return {**options, **{name: route[name] for name in DESTINATION if route.get(name) is not None}}


def limit_keys(app: Any, key: str, limits: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Make sure that ``limits`` hold for ``key`` in every queue the message will reach. Raises as publishing does.

    ``options``: from :func:`routed`.
    """
    exchange, routing_key = _destination(app, options)
    place = f"{app.conf.broker_write_url}"
    if not exchange and _knows((place, routing_key, key), limits):
        return
    with app.producer_or_acquire(options.get("producer")) as producer:
        channel = producer.channel
        if not isinstance(channel, Channel):
            return  # another broker has no limits of keys
        if exchange:
            _declare(producer, options)
        try:
            broker = Broker.of(channel.client)
            for queue in broker.topology.route(exchange, routing_key) if exchange else [routing_key]:
                if not _knows((place, queue, key), limits):
                    was_set = _known.get((place, queue, key), (0.0, None))[1] == limits  # however long ago
                    _limit(broker.queue(queue), key, limits, again=was_set)
                    if len(_known) >= MOST_KEYS:
                        _known.clear()
                    _known[place, queue, key] = _clock.monotonic() + KNOWN_S, limits
        except KombuFDBError as error:
            raise_as_amqp(error, "basic_publish")
            raise


def _destination(app: Any, route: Mapping[str, Any]) -> tuple[str, str]:
    """Exchange and routing key, as Celery's ``send_task_message`` finds them."""
    queue: Any = route.get("queue")
    exchange, routing_key = route.get("exchange"), route.get("routing_key")
    if queue is None and exchange is None:
        queue = app.amqp.default_queue
    if isinstance(queue, str):
        queue = app.amqp.queues[queue]
    own = getattr(queue, "exchange", None)
    kind = route.get("exchange_type") or getattr(own, "type", "direct")
    if kind == "direct" and not (exchange and routing_key):
        return "", "" if queue is None else queue.name
    if exchange is None:
        exchange = own or app.amqp.default_exchange
        routing_key = routing_key or queue.routing_key or app.conf.task_default_routing_key
    return getattr(exchange, "name", exchange), routing_key or ""


def _declare(producer: Any, options: Mapping[str, Any]) -> None:
    """Declare what Celery is about to declare: until then, an exchange may not know the queue, or not be there."""
    queue, declared = options.get("queue"), options.get("declare")
    if declared is None:
        declared = [queue] if queue is not None and not isinstance(queue, Broadcast) else []
    for each in declared:
        producer.maybe_declare(each)


def _limit(queue: Queue, key: str, limits: Mapping[str, Any], *, again: bool) -> None:
    """``again``: this process has set them before, so other values than those of every key are newer, and stay."""
    held = queue.limits(key)
    if all(getattr(held, name) == value for name, value in limits.items()):
        return
    others = queue.limits()
    if not again or all(getattr(held, name) == getattr(others, name) for name in limits):
        queue.limit(key, **limits)


def _knows(place: tuple[str, str, str], limits: Mapping[str, Any]) -> bool:
    until_s, known = _known.get(place, (0.0, None))
    return known == limits and _clock.monotonic() < until_s


# -- the task ----------------------------------------------------------------------------------------------------------


#: How similar a name must be to be taken for a misspelt one of ours.
CUTOFF = 0.8

Source = str | Callable[[Sequence[Any], Mapping[str, Any]], Any] | None


#: The options that a function may be given for.
SOURCES = ("fair_key", "dedup_id")


class FdbTask(Backoff, Task):
    """Base of tasks with the options above. Raises ``OptionError`` where the task is defined."""

    abstract = True

    fair_key: Source = None
    max_in_flight: int | None = None
    rate_limit_key: str | None = None
    dedup_id: Source = None
    dedup_window: float | None = None
    dead_letter: bool | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _check(cls)
        for name in SOURCES:
            _check_argument(cls, name)

    def apply_async(self, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        """As Celery's, with ``fair_key``, ``dedup_id`` and ``dedup_window`` as further options.

        Raises whatever a function of yours for a key raises: then nothing is published.
        """
        headers = dict(options.pop("headers", None) or {})
        self._add_key(headers, args or (), kwargs or {}, options)
        self._add_dedup(headers, args or (), kwargs or {}, options)
        if self.limits and not self.app.conf.task_always_eager:
            options = routed(self, args, kwargs, options)
            limit_keys(self.app, headers["fair_key"], self.limits, options)
        return super().apply_async(args, kwargs, *rest, **options, headers=headers or None)

    def replace(self, sig: Any) -> Any:
        """As Celery's. The task that gets the id of this one may have its dedup id, too, and is no duplicate of it."""
        heir = sig
        while isinstance(heir, chord) or (isinstance(heir, _chain) and heir.tasks):  # a chord's header may be empty
            heir = heir.body if isinstance(heir, chord) else heir.tasks[-1]
        if not isinstance(heir, group | _chain | chord):
            heir.set(headers={**(heir.options.get("headers") or {}), "dedup_id": ""})
        return super().replace(sig)

    def _add_key(self, headers: dict[str, Any], args: Any, kwargs: Any, options: dict[str, Any]) -> None:
        given = _taken(options, "fair_key")
        if headers.get("fair_key") is not None:
            given = headers["fair_key"]
        key = self._value("fair_key", args, kwargs) if given is None else text_of("fair_key", given)
        text = "" if key is None else str(key)
        if self.limits:
            text = self._limited(text or self._named_otherwise(args, kwargs, headers, options))
        elif not text:  # a property, which Celery does not hand on to a retry
            text = text_of("MessageGroupId", _given(options, "MessageGroupId"))
        if text:
            headers["fair_key"] = text

    def _named_otherwise(self, args: Any, kwargs: Any, headers: dict[str, Any], options: dict[str, Any]) -> str:
        """The key that the transport would find: a limit needs it before it is published."""
        key_of = key_reader((self.app.conf.broker_transport_options or {}).get("fair_key"))
        named = {**headers, "task": self.name}
        properties = {"MessageGroupId": _given(options, "MessageGroupId")}
        return key_of({"headers": named, "properties": properties, "body": (args, kwargs, {})})

    def _limited(self, key: str) -> str:
        """Adds the task's name once: a retry brings the header of the first attempt along."""
        own = str(self.name)
        return key if key == own or key.endswith(f"/{own}") else f"{key}/{own}" if key else own

    def _add_dedup(self, headers: dict[str, Any], args: Any, kwargs: Any, options: dict[str, Any]) -> None:
        given, window = _taken(options, "dedup_id"), _taken(options, "dedup_window", self.dedup_window)
        if given is None:
            value = self._value("dedup_id", args, kwargs)
            given = None if value is None else f"{self.name}:{value}"
        if given is not None:
            headers.setdefault("dedup_id", text_of("dedup_id", given))
        if window is not None and not DEDUP_IDS.isdisjoint({*headers, *options}):
            headers.setdefault("dedup_window", window)

    def _value(self, name: str, args: Any, kwargs: Any) -> Any:
        source: Source = getattr(self, name)
        if source is None:
            return None
        if callable(source):
            return source(args, kwargs)
        bound = inspect.signature(self.run).bind(*args, **kwargs)
        bound.apply_defaults()
        if source in bound.arguments:
            return bound.arguments[source]
        return bound.kwargs.get(source)

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of each of its keys, as fields of :class:`~kombu_fdb.model.KeyLimits`."""
        limits: dict[str, Any] = {}
        if self.max_in_flight is not None:
            limits["max_in_flight"] = self.max_in_flight
        if self.rate_limit_key is not None:
            limits["rate"] = rate_of(self.rate_limit_key)
        return limits

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Celery's hook, when the task's application is known."""
        super().on_bound(app)
        # Again, for what Celery has set by task_annotations: but an argument that is named there for all tasks ("*")
        # need not be one of each.
        _check(cls)
        if cls.max_in_flight is not None and not cls.acks_late:
            raise OptionError(
                "max_in_flight counts messages until they are acknowledged, which for this task is when it begins",
                task=_name(cls),
                fix="Add acks_late=True to the task, or set task_acks_late for the app.",
            )
        if cls.dead_letter:
            failures.install(app)


def _given(options: Mapping[str, Any], name: str) -> Any:
    """An option, unless it is a stamp: in Celery, stamps are among the options, too."""
    return None if name in (options.get("stamped_headers") or ()) else options.get(name)


def _taken(options: dict[str, Any], name: str, default: Any = None) -> Any:
    """Take an option of ours, unless it is a stamp."""
    return default if name in (options.get("stamped_headers") or ()) else options.pop(name, default)


# -- when a task is defined ------------------------------------------------------------------------------------------


def _check(cls: type[FdbTask]) -> None:
    """Raises ``OptionError``, or ``InvalidArgument`` for a schedule of ``backoff``."""
    _check_names(cls)
    for name in SOURCES:
        _check_source(cls, name)
    for name, value, kind in refused(_KINDS, {name: getattr(cls, name) for name in _KINDS}):
        raise _unusable(cls, name, value, kind.what)
    if cls.backoff is not None:
        seconds(cls.backoff, 1)


def _check_names(cls: type[FdbTask]) -> None:
    """A task may have attributes of its own, but not one that is nearly one of ours."""
    for name in vars(cls):
        near = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=CUTOFF)
        if near and name not in OPTIONS and not hasattr(Task, name):
            raise OptionError(
                "unknown task option",
                task=_name(cls),
                name=name,
                suggestion=near[0],
                fix=f"Did you mean {near[0]}?",
            )


def _check_source(cls: type[FdbTask], name: str) -> None:
    source = inspect.getattr_static(cls, name)
    if callable(source) and not isinstance(source, staticmethod):
        setattr(cls, name, staticmethod(source))  # else it would be a method
    elif not isinstance(source, str | staticmethod | None):
        raise _unusable(cls, name, source, "the name of an argument, or a function of (args, kwargs)")


def _check_argument(cls: type[FdbTask], name: str) -> None:
    argument = inspect.getattr_static(cls, name)
    if not isinstance(argument, str) or "run" not in vars(cls):
        return
    parameters = inspect.signature(cls.run).parameters
    if argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    near = difflib.get_close_matches(argument, parameters, n=1)
    advice = f"Did you mean {near[0]}?" if near else f"Its arguments: {', '.join(parameters) or 'none'}."
    raise OptionError(f"{name} is not an argument of the task", task=_name(cls), argument=argument, fix=advice)


_KINDS = {
    "max_in_flight": LIMIT_KINDS["max_in_flight"],
    "dedup_window": Kind.number(f"a number of seconds of at least {SHORTEST_S}", SHORTEST_S, LONGEST_S).or_none(),
    "dead_letter": Kind("True or False", FLAG.accepts).or_none(),
    "rate_limit_key": Kind(
        'a rate such as "10/s", "100/m" or "5/h"', lambda text: isinstance(text, str) and rate_of(text) is not None
    ).or_none(),
}


def _unusable(cls: type[FdbTask], name: str, value: Any, accepted: str) -> OptionError:
    return OptionError("unusable task option", task=_name(cls), name=name, value=value, fix=f"It takes {accepted}.")


def _name(cls: type[FdbTask]) -> str:
    return str(getattr(cls, "name", None) or cls.__name__)
