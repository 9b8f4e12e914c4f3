"""Django's tasks (``django.tasks``, Django 6.0 and later) on Celery and its broker.

Anyone who can publish can write a message, so its path is never imported, nor followed through attributes. It is looked
up among the tasks that the project has loaded itself: modules in which ``@task`` has made a task, under the task's own
path. Every process loads ``tasks.py`` of each installed app, as Celery's ``autodiscover_tasks`` does, and the modules
in ``OPTIONS["modules"]`` of the backend.

In the settings::

    TASKS = {"default": {"BACKEND": "celery_fdb.contrib.django.backend.CeleryBackend", "QUEUES": ["default", "mail"]}}

A task becomes the Celery task ``celery_fdb.django.run`` in the Celery queue of the same name, so ordinary workers run
it (``-Q default,mail``). Its ``run_after`` is an ETA, which waits in the broker's store; its priority, -100 to 100,
becomes one of Celery's ten, in the app's ``priority_order``: 0 becomes 4, or 5 where 0 is the most urgent. ``OPTIONS``:
``fair_key``, a header's value for every task of this backend; ``app``, as ``CELERY_FDB["APP"]``; ``modules``, where
tasks are defined besides ``tasks.py`` of the installed apps. Only tasks from there are run, whatever a message names.

Like ``delay()``, ``enqueue()`` sends at once. Inside a transaction, send after the commit:
``transaction.on_commit(partial(task.enqueue, order_id))``.

Results are Celery's: ``get_result`` needs a result backend and ``result_extended = True``, which keeps a task's
arguments with its result. A task that is still in the broker is found there. For a task that Celery has forgotten
(``result_expires``), ``get_result`` raises ``TaskResultDoesNotExist``.

With an older Django, importing this raises ``ImproperlyConfigured``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from importlib import import_module
from traceback import format_exception
from types import ModuleType
from typing import Any

from celery import Celery, states
from celery.backends.base import DisabledBackend
from celery.exceptions import Reject
from celery.utils import uuid
from django.core.checks import CheckMessage, Warning  # noqa: A004 - Django's name
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.module_loading import autodiscover_modules

from celery_fdb.contrib.django import conf
from celery_fdb.inspection import formats
from kombu_fdb.errors import FormatError, OptionError
from kombu_fdb.transport.envelope import open_payload

try:
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ImportError as error:
    if not (reason := conf.no_tasks()):
        raise
    raise ImproperlyConfigured(f"{reason} Upgrade Django, or use Celery's own tasks.") from error

# -- tasks by name -----------------------------------------------------------------------------------------------------


def registered(path: Any, modules: Iterable[str] = ()) -> Task[Any, Any] | None:
    """The task of this path; None if there is none. ``modules``: where tasks are beside ``tasks.py``."""
    found = _loaded(path)
    if found is None:
        _load(tuple(modules))
        found = _loaded(path)
    return found


def _loaded(path: Any) -> Task[Any, Any] | None:
    """What the path names, without an import or a call of a module's or an object's ``__getattr__``."""
    module_name, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    module = sys.modules.get(module_name)
    found = vars(module).get(name) if isinstance(module, ModuleType) else None
    return found if isinstance(found, Task) and found.module_path == path else None


@lru_cache(maxsize=8)
def _load(modules: tuple[str, ...]) -> None:
    """Import the modules with tasks, once. Raises what these modules raise."""
    autodiscover_modules("tasks")
    for name in modules:
        import_module(name)


# -- the backend -------------------------------------------------------------------------------------------------------


_STATUS = {
    states.SUCCESS: TaskResultStatus.SUCCESSFUL,
    states.FAILURE: TaskResultStatus.FAILED,
    states.REVOKED: TaskResultStatus.FAILED,
    states.STARTED: TaskResultStatus.RUNNING,
    states.RETRY: TaskResultStatus.READY,
}


#: The most attempts that a result lists, each with its worker: a publisher may write any number into a message.
MOST_ATTEMPTS = 100


class CeleryBackend(BaseTaskBackend):
    """The backend; see the module."""

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._fair_key: str | None = self.options.get("fair_key")

    @property
    def app(self) -> Celery:
        """Raises ``OptionError``."""
        named = self.options.get("app")
        return conf.celery_app(conf.DjangoSettings(app=named) if named else conf.read())

    @property
    def supports_get_result(self) -> bool:  # type: ignore[override]  # Django asks the instance
        app = self.app
        return bool(app.conf.result_extended) and not isinstance(app.backend, DisabledBackend)

    def enqueue(self, task: Task[Any, Any], args: Iterable[Any], kwargs: dict[str, Any]) -> TaskResult[Any, Any]:
        """Raises ``InvalidTask``, ``TypeError`` for arguments that are not JSON, kombu's ``OperationalError``."""
        self.validate_task(task)
        app, now = self.app, datetime.now(UTC)
        urgency = (task.priority + 100) * 9 // 200
        most_urgent_is_zero = (app.conf.broker_transport_options or {}).get("priority_order") == "redis"
        result = _result(task, uuid(), list(args), kwargs, self.alias, enqueued_at=now)
        due = task.run_after
        app.send_task(
            conf.RUN,
            (task.module_path, result.args, result.kwargs, self.alias, now.isoformat()),
            task_id=result.id,
            shadow=task.module_path,  # the name that logs, pages and commands show
            queue=task.queue_name,
            eta=timezone.make_aware(due) if due is not None and timezone.is_naive(due) else due,
            priority=9 - urgency if most_urgent_is_zero else urgency,
            ignore_result=False,
            headers={} if self._fair_key is None else {"fair_key": self._fair_key},
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult[Any, Any]:
        """Raises ``TaskResultDoesNotExist``, ``NotImplementedError`` without a result backend."""
        if not self.supports_get_result:
            raise NotImplementedError("Set a Celery result backend, and CELERY_RESULT_EXTENDED = True.")
        meta = self.app.backend.get_task_meta(result_id)
        if meta.get("name") == conf.RUN and meta.get("args"):
            return _finished(result_id, meta)
        return _waiting(result_id)

    def check(self, **_: Any) -> list[CheckMessage]:
        """Check that results can be read."""
        app = self.app
        try:
            has_backend = not isinstance(app.backend, DisabledBackend)
        except OptionError:  # celery_fdb.E002 says so
            return []
        if not has_backend or app.conf.result_extended:
            return []
        return [
            Warning(
                f"Results of the task backend {self.alias!r} can't be read.",
                hint="Set CELERY_RESULT_EXTENDED = True, so that Celery keeps a task's arguments with its result.",
                id="celery_fdb.W013",
            )
        ]


# -- in a worker -------------------------------------------------------------------------------------------------------


def execute(
    path: str,
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    alias: str,
    result_id: str,
    enqueued_at: datetime,
    started_at: datetime,
    worker: str,
    attempts: int,
) -> Any:
    """Call the task, with Django's signals before and after. Raises what the task raises.

    Raises ``Reject`` for a task that is not registered, so that its message becomes a dead letter.
    """
    task = _task(path, alias)
    if isinstance(task, str):
        raise Reject(ValueError(task), requeue=False)
    result = _result(task, result_id, args, kwargs, alias, enqueued_at=enqueued_at)
    _set(result, status=TaskResultStatus.RUNNING, started_at=started_at, last_attempted_at=started_at)
    result.worker_ids.extend([worker] * min(attempts, MOST_ATTEMPTS))
    task_started.send(CeleryBackend, task_result=result)
    try:
        context: list[TaskContext[Any, Any]] = [TaskContext(task_result=result)] if task.takes_context else []
        value = normalize_json(task.call(*context, *args, **kwargs))
    except BaseException as error:
        result.errors.append(_error(error))
        _set(result, status=TaskResultStatus.FAILED, finished_at=datetime.now(UTC))
        task_finished.send(CeleryBackend, task_result=result)
        raise
    _set(result, status=TaskResultStatus.SUCCESSFUL, finished_at=datetime.now(UTC), _return_value=value)
    task_finished.send(CeleryBackend, task_result=result)
    return value


def _task(path: Any, alias: Any) -> Task[Any, Any] | str:
    """The task that a message names, or why there is none: a message must not choose any function or backend."""
    backend = task_backends[alias] if isinstance(alias, str) and alias in task_backends.settings else None
    if not isinstance(backend, CeleryBackend):
        return f"{alias!r:.200} is not a CeleryBackend in this project's TASKS."
    task = registered(path, backend.options.get("modules", ()))
    if task is None:
        return (
            f"{path!r:.200} is not a Django task that is registered here. Tasks are in tasks.py of an installed app; "
            "name other modules in OPTIONS['modules'] of the backend in TASKS, for the workers too."
        )
    return task.using(backend=alias)


# -- results -----------------------------------------------------------------------------------------------------------


def _result(
    task: Task[Any, Any], result_id: str, args: list[Any], kwargs: dict[str, Any], alias: str, *, enqueued_at: datetime
) -> TaskResult[Any, Any]:
    return TaskResult(
        task=task,
        id=result_id,
        status=TaskResultStatus.READY,
        enqueued_at=enqueued_at,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=args,
        kwargs=kwargs,
        backend=alias,
        errors=[],
        worker_ids=[],
    )


def _set(result: TaskResult[Any, Any], **fields: Any) -> None:
    """Set a field of a result, which is frozen for its users. Django's own backends do the same."""
    for name, value in fields.items():
        object.__setattr__(result, name, value)


def _sent(result_id: str, arguments: Any) -> TaskResult[Any, Any]:
    """The task as :meth:`CeleryBackend.enqueue` sent it; ``TaskResultDoesNotExist`` for what was not enqueued here."""
    try:
        path, args, kwargs, alias, enqueued_at = arguments
        moment = datetime.fromisoformat(enqueued_at)
        task = _task(path, alias)
        if isinstance(task, str):
            raise TaskResultDoesNotExist(f"{result_id}: {task}")
        return _result(task, result_id, list(args), dict(kwargs), alias, enqueued_at=moment)
    except (ValueError, TypeError) as error:
        raise TaskResultDoesNotExist(f"{result_id}: {error}") from error


def _finished(result_id: str, meta: dict[str, Any]) -> TaskResult[Any, Any]:
    """The stored result. Raises ``TaskResultDoesNotExist`` for what no task of this backend has returned."""
    result = _sent(result_id, meta["args"])
    try:
        return _filled(result, meta)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise TaskResultDoesNotExist(f"{result_id}: {error!r}") from error


def _filled(result: TaskResult[Any, Any], meta: dict[str, Any]) -> TaskResult[Any, Any]:
    status = _STATUS.get(meta["status"], TaskResultStatus.READY)
    _set(result, status=status)
    if result.is_finished:
        _set(result, finished_at=_moment(meta.get("date_done")))
    if meta.get("worker"):
        result.worker_ids.extend([meta["worker"]] * min(int(meta.get("retries") or 0) + 1, MOST_ATTEMPTS))
    if status is TaskResultStatus.SUCCESSFUL:
        started_at = _moment(meta["result"]["started_at"])
        _set(result, _return_value=meta["result"]["return_value"], started_at=started_at, last_attempted_at=started_at)
    elif isinstance(meta["result"], BaseException):
        result.errors.append(_error(meta["result"], str(meta.get("traceback") or "")))
    return result


def _moment(value: Any) -> datetime | None:
    return value if value is None or isinstance(value, datetime) else formats.read(value)


def _error(error: BaseException, traceback: str | None = None) -> TaskError:
    kind = type(error)
    text = "".join(format_exception(error)) if traceback is None else traceback
    return TaskError(exception_class_path=f"{kind.__module__}.{kind.__qualname__}", traceback=text)


def _waiting(result_id: str) -> TaskResult[Any, Any]:
    """The result of a task that is still in the broker, ready, delayed or being run."""
    for message in conf.lazy_broker.broker().find(result_id):
        try:
            envelope = open_payload(message.payload)
            arguments = json.loads(envelope.body)[0] if envelope.headers.get("task") == conf.RUN else None
        except (FormatError, ValueError, LookupError, TypeError, RecursionError):
            continue  # no message of enqueue()
        if arguments is not None:
            result = _sent(result_id, arguments)
            if message.state == "leased":
                _set(result, status=TaskResultStatus.RUNNING)
            return result
    raise TaskResultDoesNotExist(result_id)
