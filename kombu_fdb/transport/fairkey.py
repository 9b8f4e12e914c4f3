"""The fairness key of a message: by it a queue is shared fairly (``engine/scheduling/fair.py``).

The first of these that is found counts; a message without any has the key "":

1. the header ``fair_key``, as in ``task.apply_async(headers={"fair_key": tenant})``;
2. ``MessageGroupId``, a property or header, as users of SQS and PGMQ write it;
3. the option ``fair_key``: either the name of another header, or a function, ``"myapp.keys:by_tenant"``, which is
   called with the task's name, its args, kwargs and headers and returns the key (None for none).

The first two are texts. The third is an application's own value, from another header or its function, so it may also be
a whole number or a UUID. Anything else is an ``InvalidArgument``. But a function that raises, or returns such a value,
must not stop the publish: the error is logged, and the message has no key.

Only JSON bodies are decoded for the function: a program that forwards a message must not unpickle it. For other bodies
the function is not called, and only headers give the message a key.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

from kombu.serialization import loads

from kombu_fdb.errors import OptionError
from kombu_fdb.transport.envelope import KeyOf, explicit_key, text_of

logger = logging.getLogger(__name__)

JSON = "application/json"

KeyFunction = Callable[[str, Any, Any, Mapping[str, Any]], Any]


def key_reader(option: str | None) -> KeyOf:
    """How this connection finds the key of a message. Raises ``OptionError`` if the option names no function."""
    if option is None:
        return explicit_key
    if ":" in option:
        return _by_function(_import(option), option)
    return lambda message: explicit_key(message) or _text(option, (message.get("headers") or {}).get(option))


def _text(name: str, value: Any) -> str:
    is_id = isinstance(value, int | UUID) and not isinstance(value, bool)
    return str(value) if is_id else text_of(name, value)


def _by_function(function: KeyFunction, name: str) -> KeyOf:
    has_warned = False

    def key_of(message: Mapping[str, Any]) -> str:
        nonlocal has_warned
        explicit = explicit_key(message)
        if explicit:
            return explicit
        try:
            if _is_readable(message):
                return _text("the fairness key", _call(function, message))
            if not has_warned:
                has_warned = True
                logger.warning(
                    "the fair_key function %s only gets JSON bodies: give other messages the header fair_key", name
                )
        except Exception:
            logger.exception("fair_key function %s failed: the message is published without a key", name)
        return ""

    return key_of


def _is_encoded(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("body"), (str, bytes)) and bool(message.get("content-type"))


def _is_readable(message: Mapping[str, Any]) -> bool:
    """Whether the body is JSON, or not encoded."""
    is_compressed = (message.get("headers") or {}).get("compression")
    return not _is_encoded(message) or (message["content-type"] == JSON and not is_compressed)


def _call(function: KeyFunction, message: Mapping[str, Any]) -> Any:
    """Call it as for Celery's protocol 2, with the body ``(args, kwargs, embed)``, or with any other body alone."""
    headers = message.get("headers") or {}
    body = message.get("body")
    if _is_encoded(message):
        body = loads(body, JSON, message.get("content-encoding"), accept={JSON})
    if "task" in headers and isinstance(body, (list, tuple)) and len(body) == 3:
        return function(headers["task"], body[0], body[1], headers)
    return function(headers.get("task", ""), (body,), {}, headers)


def _import(option: str) -> KeyFunction:
    module_name, _, attribute = option.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise OptionError(
            "fair_key names a function that can't be imported",
            fair_key=option,
            reason=str(error),
            fix="Write it as 'package.module:function'. Publishers import it, so its folder must be in PYTHONPATH.",
        ) from error
    if not callable(function):
        raise OptionError("fair_key names something that is not a function", fair_key=option)
    return function  # type: ignore[no-any-return]  # callable is all that can be known
