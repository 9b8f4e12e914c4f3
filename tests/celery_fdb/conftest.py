import pytest
from celery import Celery


@pytest.fixture
def new_app():
    """Makes applications; they and their connections are closed after the test."""
    made = []

    def new_app(broker=None, **options):
        made.append(Celery("tests", broker=broker, set_as_current=False, **options))
        return made[-1]

    yield new_app
    for app in made:
        app.pool.force_close_all()
        app.close()
