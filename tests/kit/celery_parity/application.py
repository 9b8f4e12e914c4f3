"""What the workers run: a task for each behaviour and setting, and a line in a file for all that happens to one.

Configured by the environment, because workers are processes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery, Task, group, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.worker.request import Request
from kombu.entity import Queue

import kombu_fdb.transport  # noqa: F401 - a source tree has no entry point
from celery_fdb import install
from kit.celery_parity.situations import DELAY_S, SETTINGS, SITUATIONS

FOLDER = Path(os.environ["PARITY_FOLDER"])
#: ``ASIDE``: of what no worker takes.
ASIDE, DEAD = "aside", "dead"
DEAD_LETTERS = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}

app = Celery("parity", broker=os.environ["PARITY_BROKER"], backend=os.environ["PARITY_BACKEND"], set_as_current=False)
app.conf.update(
    broker_transport_options=json.loads(os.environ["PARITY_OPTIONS"]),
    broker_connection_retry_on_startup=True,
    task_default_queue=os.environ.get("PARITY_QUEUE", ASIDE),
    task_queues=[
        *(Queue(name, queue_arguments=DEAD_LETTERS) for name in {each.scene: None for each in SITUATIONS}),
        *(Queue(ASIDE), Queue(DEAD)),
    ],
    worker_hijack_root_logger=False,
)
if os.environ["PARITY_INSTALLED"]:
    install(app)

#: How long a soft or a hard time limit is, and how much longer a task that passes it.
LIMIT_S = 1
LONGER_S = 600


def note(task_id: str, event: str) -> None:
    """One line; a single small write, so lines of several processes don't mix."""
    descriptor = os.open(FOLDER / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, (json.dumps([task_id, event]) + "\n").encode())
    finally:
        os.close(descriptor)


def allowed(name: str) -> bool:
    return (FOLDER / f"allow-{name}").exists()


def _await_acceptance(task: Task) -> None:
    """Before its process dies: a pool gives another process what it does not know to have begun."""
    deadline = time.monotonic() + LONGER_S
    while time.monotonic() < deadline and not (FOLDER / f"accepted-{task.request.id}").exists():
        time.sleep(0.01)


def _first(task: Task) -> bool:
    """Whether it is the first run of this task."""
    try:
        os.close(os.open(FOLDER / f"first-{task.request.id}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# -- what happens to a task --------------------------------------------------------------------------------------------


def _listen(**_: Any) -> None:
    def by_id(event: str) -> Callable[..., None]:
        return lambda task_id=None, **_: note(task_id, event)

    def by_request(event: str) -> Callable[..., None]:
        return lambda request=None, **_: note(request.id, event)

    heard: dict[Any, Callable[..., None]] = {
        signals.task_prerun: by_id("prerun"),
        signals.task_postrun: by_id("postrun"),
        signals.task_failure: by_id("failure"),
        signals.task_internal_error: by_id("internal error"),
        signals.task_success: lambda sender=None, **_: note(sender.request.id, "success"),
        signals.task_received: by_request("received"),
        signals.task_retry: by_request("retry"),
        signals.task_revoked: by_request("revoked"),
        signals.task_unknown: lambda id=None, **_: note(id, "unknown"),  # noqa: A006 - Celery's
        signals.task_rejected: lambda message=None, **_: note(message.headers.get("id"), "rejected"),
        signals.worker_shutting_down: lambda sender=None, **_: note(sender, "shutting down"),
    }
    for each, receiver in heard.items():
        each.connect(receiver, weak=False)
    accept = Request.on_accepted

    def on_accepted(request: Any, *given: Any) -> None:
        accept(request, *given)
        (FOLDER / f"accepted-{request.id}").touch()

    Request.on_accepted = on_accepted


signals.worker_init.connect(_listen, weak=False)


class Noted(Task):
    """Its hooks are noted as well."""

    abstract = True
    failing_hook: str | None = None

    def before_start(self, task_id: str, *_: Any) -> None:
        self._hook("before_start", task_id)

    def on_success(self, _: Any, task_id: str, *__: Any) -> None:
        self._hook("on_success", task_id)

    def on_failure(self, _: Any, task_id: str, *__: Any) -> None:
        self._hook("on_failure", task_id)

    def on_retry(self, _: Any, task_id: str, *__: Any) -> None:
        self._hook("on_retry", task_id)

    def after_return(self, _: Any, __: Any, task_id: str, *___: Any) -> None:
        self._hook("after_return", task_id)

    def _hook(self, name: str, task_id: str) -> None:
        note(task_id, name)
        if name == self.failing_hook:
            raise ArithmeticError(name)


# -- what a task does --------------------------------------------------------------------------------------------------

_behaviours: list[tuple[Callable[..., Any], dict[str, Any]]] = []


def behaviour(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def remember(function: Callable[..., Any]) -> Callable[..., Any]:
        _behaviours.append((function, options))
        return function

    return remember


def the(task: str, task_id: str, setting: str = "early") -> Any:
    """A signature."""
    return app.signature(f"{task} {setting}", task_id=task_id)


@behaviour()
def ok(task: Task, *given: Any) -> Any:
    return list(given) or "done"


@behaviour()
def fail(task: Task, *_: Any) -> None:
    raise ValueError("broken")


@behaviour()
def fail_with_what_is_no_error(task: Task, *_: Any) -> None:
    raise BaseException("broken")  # noqa: TRY002 - no Exception, which is the point


@behaviour(default_retry_delay=0)
def retry_once(task: Task, *_: Any) -> int:
    if not task.request.retries:
        raise task.retry(exc=ValueError("once"))
    return int(task.request.retries)


@behaviour(default_retry_delay=0, max_retries=2)
def retry_for_ever(task: Task, *_: Any) -> None:
    raise task.retry(exc=ValueError("again"))


@behaviour(autoretry_for=(ValueError,), default_retry_delay=0, max_retries=1)
def retry_by_itself(task: Task, *_: Any) -> None:
    raise ValueError("again")


@behaviour(default_retry_delay=0)
def retry_without_raising(task: Task, *_: Any) -> str:
    if not task.request.retries:
        task.retry(throw=False)
    return "done"


@behaviour()
def retry_later(task: Task, *_: Any) -> int:
    if not task.request.retries:
        raise task.retry(countdown=DELAY_S)
    return int(task.request.retries)


@behaviour()
def ignore(task: Task, *_: Any) -> None:
    raise Ignore


@behaviour()
def ignore_with_a_state(task: Task, *_: Any) -> None:
    task.update_state(state="PROGRESS", meta={"done": 1})
    raise Ignore


@behaviour()
def reject(task: Task, *_: Any) -> None:
    raise Reject("never", requeue=False)


@behaviour()
def requeue_once(task: Task, *_: Any) -> str:
    if _first(task):
        raise Reject("not now", requeue=True)
    return "done"


@behaviour()
def run_out_of_memory(task: Task, *_: Any) -> None:
    raise MemoryError("too large")


@behaviour(name="exit")
def leave(task: Task, *_: Any) -> str:
    if _first(task):
        _await_acceptance(task)
        raise SystemExit(3)
    return "done"


@behaviour()
def interrupt(task: Task, *_: Any) -> str:
    if _first(task):
        raise KeyboardInterrupt
    return "done"


@behaviour()
def die_once(task: Task, *_: Any) -> str:
    if _first(task):
        _await_acceptance(task)
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


@behaviour()
def leave_once(task: Task, *_: Any) -> str:
    if _first(task):
        _await_acceptance(task)
        os._exit(3)
    return "done"


@behaviour(soft_time_limit=LIMIT_S)
def overrun_softly(task: Task, *_: Any) -> None:
    time.sleep(LONGER_S)


@behaviour(soft_time_limit=LIMIT_S)
def catch_a_soft_limit(task: Task, *_: Any) -> str:
    try:
        time.sleep(LONGER_S)
    except SoftTimeLimitExceeded:
        return "caught"
    return "too fast"


@behaviour(time_limit=LIMIT_S)
def overrun(task: Task, *_: Any) -> None:
    time.sleep(LONGER_S)


@behaviour(time_limit=LIMIT_S)
def overrun_once(task: Task, *_: Any) -> str:
    if _first(task):
        time.sleep(LONGER_S)
    return "done"


@behaviour(time_limit=LIMIT_S, failing_hook="on_failure")
def overrun_and_fail_in_on_failure(task: Task, *_: Any) -> None:
    time.sleep(LONGER_S)


@behaviour()
def replace_itself(task: Task, *_: Any) -> Any:
    return task.replace(app.signature("ok early"))


@behaviour()
def replace_itself_by_a_group(task: Task, *_: Any) -> Any:
    parts = [the("ok", f"{task.request.id}.part{number}") for number in (1, 2)]
    return task.replace(group(parts, app=app))


@behaviour()
def replace_itself_by_a_failure(task: Task, *_: Any) -> Any:
    return task.replace(app.signature("fail early"))


@behaviour()
def join_its_chord(task: Task, *_: Any) -> Any:
    if task.request.id.endswith("member2"):
        task.add_to_chord(the("ok", f"{task.request.id}.joined"))
    return "done"


@behaviour()
def return_what_cannot_be_encoded(task: Task, *_: Any) -> Any:
    return object()


@behaviour()
def raise_what_cannot_be_encoded(task: Task, *_: Any) -> None:
    raise ValueError(lambda: None)


@behaviour(failing_hook="before_start")
def fail_before_it_starts(task: Task, *_: Any) -> str:
    return "done"


@behaviour(failing_hook="on_success")
def fail_in_on_success(task: Task, *_: Any) -> str:
    return "done"


@behaviour(failing_hook="on_failure")
def fail_in_on_failure(task: Task, *_: Any) -> None:
    raise ValueError("broken")


@behaviour(failing_hook="after_return")
def fail_in_after_return(task: Task, *_: Any) -> str:
    return "done"


@behaviour()
def hold(task: Task, *_: Any) -> str:
    """The first time it runs until it is allowed to end."""
    if _first(task):
        deadline = time.monotonic() + LONGER_S
        while time.monotonic() < deadline and not allowed(task.request.id):
            time.sleep(0.01)
        note(task.request.id, "end")
    return "done"


@app.task(bind=True, base=Noted, name="errback", shared=False)
def errback(task: Task, task_id: str) -> None:
    """Of the form that gets an id: it runs as a task of its own."""
    note(task_id, "errback")


@app.task(bind=True, base=Noted, name="inline errback", shared=False)
def inline_errback(task: Task, request: Any, exc: Exception, traceback: Any) -> None:
    note(request.id, f"inline errback {type(exc).__name__}")


def _define(function: Callable[..., Any], name: str, options: dict[str, Any]) -> None:
    def run(task: Task, *given: Any) -> Any:
        note(task.request.id, "run again" if task.request.delivery_info.get("redelivered") else "run")
        return function(task, *given)

    app.task(run, bind=True, base=Noted, name=name, shared=False, **options)


for _function, _given in _behaviours:
    _named = {**_given}
    _name = _named.pop("name", _function.__name__)
    for _setting, _options in SETTINGS.items():
        _define(_function, f"{_name} {_setting}", {**_named, **_options})
