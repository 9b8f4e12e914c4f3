import pytest

from celery_fdb import install
from celery_fdb.tasks.task import _known
from kombu_fdb.engine.messages.publish import Publisher


@pytest.fixture
def url(tmp_path):
    """No option of a task asks which store it is."""
    return f"fdb+sqlite:///{tmp_path}/broker.db"


@pytest.fixture
def app(url, new_app):
    app = install(new_app(url, backend="cache+memory://"))
    app.conf.update(task_default_queue="q", broker_connection_timeout=2.0)
    _known.clear()
    return app


@pytest.fixture
def sent(app):
    """The messages that wait, as ``(task, args, kwargs, headers)``, taken off the queue."""

    def sent(queue="q"):
        found = []
        with app.connection_for_read() as connection:
            channel = connection.channel()
            while (message := channel.basic_get(queue, no_ack=True)) is not None:
                args, kwargs, _ = message.decode()
                found.append((message.headers["task"], args, kwargs, message.headers))
        return found

    return sent


@pytest.fixture
def commits(monkeypatch):
    """How many messages each publishing transaction had."""
    sizes = []
    publish = Publisher.publish

    def publish_and_tell(publisher, publications, **options):
        sizes.append(len(publications))
        return publish(publisher, publications, **options)

    monkeypatch.setattr(Publisher, "publish", publish_and_tell)
    return sizes
