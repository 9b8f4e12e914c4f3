from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery


@pytest.fixture
def new_app() -> Iterator[Callable[..., Celery]]:
    """Makes applications; they and their connections are closed after the test."""
    made: list[Celery] = []

    def new_app(broker: Any = None, **options: Any) -> Celery:
        made.append(Celery("tests", broker=broker, set_as_current=False, **options))
        return made[-1]

    yield new_app
    for app in made:
        app.pool.force_close_all()
        app.close()
