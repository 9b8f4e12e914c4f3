"""The tasks of ``django.tasks`` that this process knows, by the paths in messages and results.

Anyone who can publish can write a message, so its path is never imported, nor followed through attributes. It is looked
up among the tasks that the project has loaded itself: modules in which ``@task`` has made a task, under the task's own
path. Every process loads ``tasks.py`` of each installed app, as Celery's ``autodiscover_tasks`` does, and the modules
in ``OPTIONS["modules"]`` of the backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from django.tasks.base import Task
from django.utils.module_loading import autodiscover_modules


class UnknownTask(ValueError):
    """A path that names no task of this process."""


def registered(path: Any, modules: Iterable[str] = ()) -> Task[Any, Any]:
    """The task of this path. ``modules``: where tasks are beside ``tasks.py``. Raises :class:`UnknownTask`."""
    found = _loaded(path)
    if found is None:
        _load(tuple(modules))
        found = _loaded(path)
    if found is None:
        raise UnknownTask(
            f"{path!r:.200} is not a Django task that is registered here. Tasks are in tasks.py of an installed app; "
            "name other modules in OPTIONS['modules'] of the backend in TASKS, for the workers too."
        )
    return found


def _loaded(path: Any) -> Task[Any, Any] | None:
    """Without an import, and without calling a module's or an object's ``__getattr__``."""
    module_name, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    module = sys.modules.get(module_name)
    found = vars(module).get(name) if isinstance(module, ModuleType) else None
    return found if isinstance(found, Task) and found.module_path == path else None


@lru_cache(maxsize=8)
def _load(modules: tuple[str, ...]) -> None:
    """Once. Raises what the project's own modules raise."""
    autodiscover_modules("tasks")
    for name in modules:
        import_module(name)
