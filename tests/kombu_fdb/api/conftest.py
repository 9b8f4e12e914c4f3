import pytest
from kit.faces import Driven, Loop

from kombu_fdb import Broker, aio

#: No consumer is served by its safety look: what wakes one in these tests is a watch.
OPTIONS = {"poll_interval": 3600.0}


@pytest.fixture
def url(any_store):
    return any_store


@pytest.fixture
def sync(url):
    with Broker.open(url, **OPTIONS) as broker:
        yield broker


@pytest.fixture
def broker(url, sync):
    """Either face of an open broker: asyncio's, which is made of the other one, and on SQLite that one alone."""
    if url.startswith("fdb+sqlite:"):
        yield sync
        return
    loop = Loop()
    with Driven(aio.Broker(sync), loop) as broker:
        yield broker
    loop.close()


@pytest.fixture(autouse=True)
def _jobs_are_kept(request):
    if "drops_jobs" not in request.keywords and request.path.name == "test_faces.py":
        request.getfixturevalue("jobs_are_kept")
