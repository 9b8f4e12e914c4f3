"""``celery_fdb.install(app)``: everything that celery-fdb adds to a Celery application, in one line."""

from __future__ import annotations

from functools import cache
from typing import Any

from celery import Celery, Task
from celery.utils.imports import symbol_by_name

from celery_fdb.history.options import History
from celery_fdb.tasks import failures
from celery_fdb.tasks.task import FdbTask
from kombu_fdb.errors import OptionError
from kombu_fdb.primitives.ranges import shown
from kombu_fdb.transport.worker import OPTIONS

#: An application's default classes and ours. A class that is not the default is left as it is.
CELERYS_CONTROL = "celery.app.control:Control"
OUR_CONTROL = "celery_fdb.control:Control"
CELERYS_AMQP = "celery.app.amqp:AMQP"
OUR_AMQP = "celery_fdb.history.run:AMQP"


def install(app: Celery, *, claim_free_slots_only: bool = False, history: bool | History = False) -> Celery:
    """Give the tasks of ``app`` the options of :class:`~celery_fdb.tasks.task.FdbTask`; ``revoke`` reaches the store.

    Idempotent.

    Tasks that ask for it become dead letters when they fail (``failures.py``).

    Call it right after ``Celery(...)``, before the first task is defined; later it raises ``OptionError``. Your own
    task and control classes are kept; the task class, and that of a task with a ``base``, gets ``FdbTask`` as a further
    base. A task class that is registered with options of ours, and does not derive from ``FdbTask``, is an
    ``OptionError``. Returns ``app``.

    ``claim_free_slots_only``: a prefork worker claims a task only when a process is free to run it
    (:mod:`celery_fdb.tasks.free_slots`), as Celery's ``worker_disable_prefetch`` does on Redis.

    ``history``: workers keep in the broker's store what ran, when, how long and with what result (docs/history.md).
    True, or a :class:`~celery_fdb.history.options.History` with bounds. Raises ``OptionError`` for anything else.
    """
    if not isinstance(app, Celery):
        fix = 'Pass the app itself: app = Celery("shop", ...), then celery_fdb.install(app).'
        raise OptionError("not a Celery app", given=shown(app), fix=fix)
    bounds = History.of(history)
    users = {name: task for name, task in app._tasks.items() if not name.startswith("celery.")}
    early = sorted(name for name, task in users.items() if not isinstance(task, FdbTask))
    if early:
        raise OptionError(
            "tasks are already defined", tasks=early[:5], fix="Call celery_fdb.install(app) right after Celery(...)."
        )
    failures.install(app)
    app.task_cls = _task_class(symbol_by_name(app.task_cls))
    app.__dict__.pop("Task", None)  # made from it when first asked for
    _adopt(app)
    if app.control_cls == CELERYS_CONTROL:
        app.control_cls = OUR_CONTROL
        app.__dict__.pop("control", None)
    if claim_free_slots_only:
        from celery_fdb.tasks.free_slots import FreeSlots

        app.steps["consumer"].add(FreeSlots)
    if bounds is not None:
        from celery_fdb.history.recorder import keep_history

        if app.amqp_cls == CELERYS_AMQP:
            app.amqp_cls = OUR_AMQP
            app.__dict__.pop("amqp", None)
        keep_history(app, bounds)
    return app


def _adopt(app: Celery) -> None:
    """Give the options to every task class of the app, also to a class that is not the app's own."""
    if "register_task" in vars(app):
        return
    make, register = app._task_from_fun, app.register_task

    def task_from_fun(fun: Any, name: str | None = None, base: Any = None, bind: bool = False, **options: Any) -> Any:
        return make(fun, name=name, base=base and _task_class(base), bind=bind, **options)

    def register_task(task: Any, **options: Any) -> Any:
        given = [option for option in OPTIONS if getattr(task, option, None) is not None]
        if given and not (isinstance(task, FdbTask) or (isinstance(task, type) and issubclass(task, FdbTask))):
            fix = "Derive its class from celery_fdb.FdbTask."
            raise OptionError("a task class without the options of celery-fdb", options=given, fix=fix)
        return register(task, **options)

    vars(app).update(_task_from_fun=task_from_fun, register_task=register_task)


@cache
def _task_class(current: type[Task]) -> type[Task]:
    """The class with ``FdbTask`` as its last base. With Django, ``current`` is Celery's own class for Django."""
    if issubclass(current, FdbTask):
        return current
    if current is Task:
        return FdbTask
    return type(current.__name__, (current, FdbTask), {"__module__": current.__module__, "abstract": True})
