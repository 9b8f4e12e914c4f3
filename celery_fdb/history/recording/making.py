"""From a worker's request to the run that is stored: taken at once, bounded, and later made fit to be shown.

Whatever stands in a message was written by somebody else: names of 100 kB, errors of 10 MB, texts that have no UTF-8
form. What is held until the flush is cut at once, so that a hostile message costs no more than another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery.exceptions import Retry

from celery_fdb.history.options import History
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
from celery_fdb.inspection.masking import masked_text
from celery_fdb.tasks.failures import details_of
from kombu_fdb.primitives.ranges import LATEST_MS, LONGEST_S, MOST, is_number, is_whole

__all__ = ["Facts", "run_of"]

#: A text without any of these, in small letters, names no secret (``inspection/masking.py``).
HINTS = ("auth", "pass", "secret", "token", "cookie", "credential", "key", "://")


@dataclass(slots=True)
class Facts:
    """What is taken from a request when a run ends."""

    headers: dict[str, Any]
    task: Any
    queue: Any
    worker: Any
    state: str
    started_s: Any
    end_ms: int
    runtime: Any
    args: Any
    kwargs: Any
    followers: tuple[Follower, ...]
    error_class: str = ""
    error: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, request: Any, state: str, end_ms: int, runtime: float | None) -> Facts:
        found = request._request_dict
        info = request._message.delivery_info or {}
        return cls(
            {name: found[name] for name in _HEADERS if name in found},
            request._type,
            info.get("queue"),
            request._hostname,
            state,
            request.time_start,
            end_ms,
            runtime,
            _cut(request._argsrepr),
            _cut(request._kwargsrepr),
            _followers(request),
        )

    def fail(self, exc: Any, traceback: Any) -> None:
        """``exc``: an exception, or a text."""
        if exc is None:
            return
        if not isinstance(exc, BaseException):
            self.error = bounded(exc, ERROR_LENGTH)
            return
        details = details_of(_cause(exc), traceback)
        self.error_class, self.error = details["error_class"], details["error"]
        self.traceback = details["traceback"]

    @property
    def weight(self) -> int:
        """Characters, about."""
        return len(self.error) + len(self.traceback) + len(self.args) + len(self.kwargs) + 200 * len(self.followers)


_HEADERS = ("id", "root_id", "parent_id", "group", "fair_key", "retries", "x-delivery-count")


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
    found = facts.headers
    start_ms, end_ms, runtime_s = _moment(facts.started_s), facts.end_ms, _runtime(facts)
    if start_ms and runtime_s:  # not when the main process heard of it, which may be a moment later
        end_ms = min(end_ms, start_ms + int(runtime_s * 1000))
    given_id, given_root = found.get("id"), found.get("root_id")
    task_id = _name(given_id)
    root = "" if given_root is None or given_root == given_id else id_text(given_root)
    return Run(  # by their places: names take a microsecond more
        task_id,
        _name(facts.task),
        _name(facts.queue),
        _name(facts.worker),
        facts.state,
        start_ms,
        end_ms,
        runtime_s,
        _argument(facts.args, options),
        _argument(facts.kwargs, options),
        _name(found.get("fair_key")),
        _whole(found.get("retries")),
        _whole(found.get("x-delivery-count")),
        "" if root == task_id else root,
        _name(found.get("parent_id")),
        bounded(facts.error_class, NAME_LENGTH),
        _shown(facts.error, ERROR_LENGTH),
        _shown(facts.traceback, TRACEBACK_LENGTH, end=True) if options.tracebacks else "",
        _name(found.get("group")),
        facts.followers,
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


def _runtime(facts: Facts) -> float | None:
    """As the process that ran it measured it, else since it was accepted."""
    if is_number(facts.runtime, 0, LONGEST_S):
        return round(float(facts.runtime), 6)
    start_ms = _moment(facts.started_s)
    return max(facts.end_ms - start_ms, 0) / 1000 if start_ms and facts.end_ms else None


def _whole(value: Any) -> int:
    return value if is_whole(value, 0, MOST) else 0
