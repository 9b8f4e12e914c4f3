"""Queue arguments: their names, what they accept, and what a claim must know of them.

AMQP's keep their names, units and meaning (https://www.rabbitmq.com/docs/queues#optional-arguments); ours begin with
``x-fair-``. Arguments that we don't know are kept and not acted upon, as in RabbitMQ; but a misspelt one is an error,
or a queue would grow without the limit that it was given.

A publish looks arguments up in the declaration, which is cached (``routing/tables.py``). A claim can't: it must not be
a second behind. What it needs stands in the queue's control record too, which each claim reads anyway.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from kombu_fdb.errors import InvalidArgument
from kombu_fdb.primitives.ranges import FLAG, MOST, TEXT, Kind, refused, shown, whole
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

OVERFLOW_MODES = ("drop-head", "reject-publish", "reject-publish-dlx")
#: Our own arguments begin with it.
OWN = "x-fair-"
#: A name so like one of ours is misspelt. None of RabbitMQ's other arguments is: ``x-priority`` is the nearest, 0.83.
LIKE = 0.88


def _whole(what: str, least: int, most: int = MOST) -> Kind:
    return whole(f"a whole number of {what}", least, most)


KINDS = {
    "x-message-ttl": _whole("milliseconds, 0 or more", 0),
    "x-expires": _whole("milliseconds, at least 1", 1),
    "x-max-length": _whole("messages, 0 or more", 0),
    "x-max-length-bytes": _whole("bytes, 0 or more", 0),
    "x-overflow": Kind(", ".join(OVERFLOW_MODES[:2]) + f" or {OVERFLOW_MODES[2]}", lambda v: v in OVERFLOW_MODES),
    "x-dead-letter-exchange": TEXT,
    "x-dead-letter-routing-key": TEXT,
    "x-delivery-limit": _whole("redeliveries; a negative number means no limit", -MOST),
    "x-max-priority": _whole("priorities from 0 to 255, of which there are 10 here", 0, 255),
    "x-single-active-consumer": FLAG,
    "x-consumer-timeout": _whole("milliseconds, at least 1", 1),
    "x-queue-type": Kind(
        "classic or quorum, which are the same here. A stream, whose consumers leave the messages there, is none",
        lambda value: value in ("classic", "quorum"),
    ),
    "x-max-age": Kind("for streams only. For messages that expire set x-message-ttl", lambda _: False),
    "x-fair-ageing": _whole("milliseconds of waiting that count as one priority, at least 1", 1),
}


def check_flags(declared: QueueDeclaration | Exchange, *names: str) -> None:
    """Other values could not be read back, nor the lists that they stand in. Raises ``InvalidArgument``."""
    for name in names:
        if not isinstance(getattr(declared, name), bool):
            raise InvalidArgument(f"{name} is true or false", given=shown(getattr(declared, name)))
    if not isinstance(declared.arguments, dict):
        raise InvalidArgument("arguments are a dictionary", given=shown(declared.arguments))


def check_exchange(declared: Exchange) -> None:
    """Raises ``InvalidArgument``."""
    check_flags(declared, "durable", "auto_delete")
    alternate = declared.arguments.get("alternate-exchange")
    if not isinstance(alternate, str | None):
        raise InvalidArgument(
            "unusable argument", exchange=declared.name, fix="alternate-exchange is a text", given=shown(alternate)
        )


def check(declaration: QueueDeclaration) -> None:
    """Raises ``InvalidArgument``, which names the argument and what it accepts. An argument of None counts as unset."""
    check_flags(declaration, "durable", "exclusive", "auto_delete")
    given = {name: value for name, value in declaration.arguments.items() if value is not None}
    for name in given.keys() - KINDS.keys():
        _check_name(declaration.name, name)
    for name, value, kind in refused(KINDS, given):
        raise InvalidArgument(
            "unusable queue argument", queue=declaration.name, fix=f"{name} is {kind.what}", **{name: value}
        )
    if "x-dead-letter-routing-key" in given and "x-dead-letter-exchange" not in given:
        raise InvalidArgument(
            "x-dead-letter-routing-key without x-dead-letter-exchange",
            queue=declaration.name,
            fix='Set the exchange too; "" is the default exchange',
        )


def _check_name(queue: str, name: str) -> None:
    own = name.startswith(OWN)
    ours = [each for each in KINDS if each.startswith(OWN)] if own else KINDS
    near = difflib.get_close_matches(name, ours, n=1, cutoff=0 if own else LIKE)
    if near:
        raise InvalidArgument("unknown queue argument", queue=queue, name=name, fix=f"Did you mean {near[0]}?")


def for_claims(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`~kombu_fdb.model.QueueControl` that the arguments set."""
    ageing_ms = arguments.get("x-fair-ageing")
    return {
        "single_active": bool(arguments.get("x-single-active-consumer")),
        "consumer_timeout_ms": arguments.get("x-consumer-timeout") or 0,
        "ageing": None if ageing_ms is None else ageing_ms / 1000,
    }
