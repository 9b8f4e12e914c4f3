"""From a worker's request to the run that is stored: taken at once, bounded, and later made fit to be shown.

Whatever stands in a message was written by another program: names of 100 kB, errors of 10 MB, texts that have no UTF-8
form. What is held until the flush is cut at once, so that a hostile message costs no more than another.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from celery.exceptions import Retry

from celery_fdb.history.options import History
from celery_fdb.history.publishing import PUBLISHED
from celery_fdb.history.run import (
    ARGUMENTS_LENGTH,
    ERROR_LENGTH,
    MOST_FOLLOWERS,
    NAME_LENGTH,
    TRACEBACK_LENGTH,
    Follower,
    Run,
    bounded,
    id_text,
)
from celery_fdb.tasks.failures import details_of
from kombu_fdb.primitives.masking import masked_text
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_S, MOST, is_number, is_whole

#: A text without any of these, in small letters, names no secret (``primitives/masking.py``).
HINTS = ("auth", "pass", "secret", "token", "cookie", "credential", "key", "://")


#: What is taken from a request when a run ends: bounded texts, numbers, and tuples of them, in the order of
#: :func:`facts_of`. A plain tuple, so that the garbage collector has nothing to do with what waits.
Facts = tuple[Any, ...]
#: Class of the error, its text, the end of the traceback.
Error = tuple[str, str, str]
NO_ERROR: Error = ("", "", "")


def facts_of(request: Any, state: str, end_ms: int, runtime: float | None, error: Error = NO_ERROR) -> Facts:
    """Called in the worker's event loop, for each run."""
    get = request._request_dict.get
    info = request._message.delivery_info
    task_id, root = _name(get("id")), get("root_id")
    return (
        task_id,
        _name(request._type),
        _name(info.get("queue")) if info else "",
        _name(request._hostname),
        state,
        request.time_start,
        end_ms,
        runtime,
        _cut(request._argsrepr),
        _cut(request._kwargsrepr),
        _whole(get(PUBLISHED)),
        _cut(get("eta")),
        "" if root is None or root == task_id else _name(root),
        _name(get("parent_id")),
        _name(get("group")),
        _name(get("fair_key")),
        _whole(get("retries")),
        _whole(get("x-delivery-count")),
        _followers(request),
        error,
    )


def error_of(exc: Any, traceback: Any) -> Error:
    """``exc``: an exception, or a text, or None."""
    if exc is None:
        return NO_ERROR
    if not isinstance(exc, BaseException):
        return "", bounded(exc, ERROR_LENGTH), ""
    details = details_of(_cause(exc), traceback)
    return bounded(details["error_class"]), details["error"], details["traceback"]


def weight_of(facts: Facts) -> int:
    """Characters, about."""
    _error_class, error, traceback = facts[-1]
    return len(facts[8]) + len(facts[9]) + len(error) + len(traceback) + 200 * len(facts[-2])


def _cause(exc: BaseException) -> BaseException:
    """Of a retry: why."""
    inner = exc.exc if isinstance(exc, Retry) else None
    return inner if isinstance(inner, BaseException) else exc


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return text if len(text) <= ARGUMENTS_LENGTH else text[:ARGUMENTS_LENGTH]


def _followers(request: Any) -> tuple[Follower, ...]:
    """The tasks that are published after it: the rest of its chain, and its chord's body."""
    payload = request._payload
    embed = payload[2] if isinstance(payload, (list, tuple)) and len(payload) > 2 else None
    if not isinstance(embed, dict):
        return ()
    chain, chord = embed.get("chain"), embed.get("chord")
    if not chain and not chord:
        return ()
    signatures = [*reversed(chain[-MOST_FOLLOWERS:] if isinstance(chain, list) else ()), chord]
    found = [each for each in map(_follower, signatures) if each is not None]
    return tuple(found[:MOST_FOLLOWERS])


def _follower(signature: Any) -> Follower | None:
    options = signature.get("options") if isinstance(signature, dict) else None
    task_id = options.get("task_id") if isinstance(options, dict) else None
    return Follower(id_text(task_id), bounded(signature.get("task"))) if task_id else None


# -- by the flush ------------------------------------------------------------------------------------------------------


def run_of(facts: Facts, options: History) -> Run:
    """As it is stored. Called for each run, so what most runs don't have costs nothing."""
    task_id, task, queue, worker, state, started_s, end_ms, runtime, args, kwargs, *rest = facts
    published_ms, eta, root, parent, group, key, retries, redeliveries, followers, (error_class, error, traceback) = (
        rest
    )
    start_ms = _moment(started_s)
    runtime_s = _runtime(runtime, start_ms, end_ms)
    if start_ms and runtime_s:  # not when the main process heard of it, which may be a moment later
        end_ms = min(end_ms, start_ms + int(runtime_s * 1000))
    return Run(  # by their places: names take a microsecond more
        task_id,
        task,
        queue,
        worker,
        state,
        start_ms,
        end_ms,
        runtime_s,
        _argument(args, options),
        _argument(kwargs, options),
        min(published_ms, LATEST_MS),
        _eta_ms(eta) if eta else 0,
        key,
        retries,
        redeliveries,
        root,
        parent,
        error_class,
        _shown(error, ERROR_LENGTH),
        _shown(traceback, TRACEBACK_LENGTH, end=True) if options.tracebacks else "",
        group,
        followers,
    )


def _name(value: Any) -> str:
    """As :func:`bounded`, at once for what is nothing or needs no change."""
    if value is None:
        return ""
    return value if type(value) is str and len(value) <= NAME_LENGTH and value.isascii() else bounded(value)


def _argument(text: str, options: History) -> str:
    if options.arguments == "none":
        return ""
    return _shown(text, ARGUMENTS_LENGTH) if options.arguments == "masked" else bounded(text, ARGUMENTS_LENGTH)


def _shown(text: str, most: int, *, end: bool = False) -> str:
    """Without the secrets that it names."""
    if not text:
        return ""
    small = text.lower()
    for hint in HINTS:
        if hint in small:
            return bounded(masked_text(text), most, end=end)
    return bounded(text, most, end=end)


def _moment(seconds: Any) -> int:
    return int(seconds * 1000) if is_number(seconds, 0, LATEST_MS // 1000) else 0


def _eta_ms(eta: str) -> int:
    """Of the header, in which Celery writes a date; without a zone it is in UTC."""
    try:
        moment = datetime.fromisoformat(eta)
        return _moment((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return 0


def _runtime(runtime: Any, start_ms: int, end_ms: int) -> float | None:
    """As the process that ran it measured it, else since it was accepted."""
    if is_number(runtime, 0, LONGEST_S):
        return round(float(runtime), 6)
    return max(end_ms - start_ms, 0) / 1000 if start_ms and end_ms else None


def _whole(value: Any) -> int:
    return value if is_whole(value, 0, MOST) else 0
