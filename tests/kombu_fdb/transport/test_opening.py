"""Threads that begin to use a store at the same time: one asks it for all (BOUNDED)."""

import threading
import time

import pytest
from kit.faults import Interrupted

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.process import client as client_module
from kombu_fdb.process import connect, session_threads
from kombu_fdb.process.client import Client
from kombu_fdb.settings.location import MemoryLocation, locate, parse_url
from kombu_fdb.settings.options import parse_options
from kombu_fdb.testing.stores import MemoryStores

THREADS = 10
DEADLINE_S = 60.0


class User:
    """A connection, or a broker."""


@pytest.fixture
def client():
    options = parse_options({})
    location = locate(parse_url(f"fdb+memory://{random_id().hex()}"), options)
    assert isinstance(location, MemoryLocation)
    with MemoryStores():
        client = Client(location, options)
        yield client
        client.close()


class Store:
    """Does what it is told, when it is told."""

    def __init__(self, answer):
        self.asked, self.answers = threading.Event(), threading.Event()
        self.calls = 0
        self._answer = answer

    def __call__(self, *args, **given):
        self.calls += 1
        self.asked.set()
        assert self.answers.wait(DEADLINE_S)
        return self._answer(*args, **given)


def unavailable(*_, **__):
    raise StoreUnavailable("the test switched it off", fix="Switch it on")


def together(work):
    """In many threads; what comes out of each."""
    outcomes = []

    def run():
        try:
            outcomes.append(work())
        except StoreUnavailable as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    return threads, outcomes


def wait_for(number, attempt):
    deadline = time.monotonic() + DEADLINE_S
    while len(attempt._lock) < number:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def end(threads):
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("answer", "outcome", "attached"),
    [(unavailable, "the test switched it off. Switch it on", 0), (connect.open_store, None, THREADS)],
)
def test_a_store_is_asked_once(client, monkeypatch, answer, outcome, attached):
    store = Store(answer)
    monkeypatch.setattr(connect, "open_store", store)
    users = [User() for _ in range(THREADS)]
    rest = iter(users)
    threads, outcomes = together(lambda: client.attach(next(rest), timeout_s=DEADLINE_S))
    wait_for(THREADS, client._opening)
    store.answers.set()
    end(threads)
    assert store.calls == 1
    assert outcomes == [outcome] * THREADS
    assert len(client._users) == attached


def test_no_thread_waits_longer_than_its_timeout(client, monkeypatch):
    store = Store(unavailable)
    monkeypatch.setattr(connect, "open_store", store)
    first, _ = together(lambda: client.attach(User(), timeout_s=DEADLINE_S))
    assert store.asked.wait(DEADLINE_S)
    with pytest.raises(StoreUnavailable, match="another thread"):
        client.attach(User(), timeout_s=0.01)
    store.answers.set()
    end(first)


def test_an_open_store_is_looked_at_by_all_at_once(client, monkeypatch):
    user = User()
    client.attach(user, timeout_s=DEADLINE_S)
    barrier = threading.Barrier(THREADS, timeout=DEADLINE_S)
    verify = connect.verify

    def verify_together(*args, **given):
        barrier.wait()
        verify(*args, **given)

    monkeypatch.setattr(connect, "verify", verify_together)
    threads, outcomes = together(lambda: client.attach(User(), timeout_s=DEADLINE_S))
    end(threads)
    assert outcomes == [None] * THREADS


def test_the_next_attempt_is_a_new_one(client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(connect, "open_store", unavailable)
        with pytest.raises(StoreUnavailable):
            client.attach(User(), timeout_s=DEADLINE_S)
    user = User()
    client.attach(user, timeout_s=DEADLINE_S)
    assert client.database is not None


def test_one_session_for_all(client, monkeypatch):
    user = User()
    client.attach(user, timeout_s=DEADLINE_S)
    away = Store(unavailable)
    with monkeypatch.context() as patch:
        patch.setattr(client.engine.sessions, "open", away)
        threads, outcomes = together(client.session)
        wait_for(THREADS, client._joining)
        away.answers.set()
        end(threads)
    assert away.calls == 1
    assert outcomes == ["the test switched it off. Switch it on"] * THREADS
    threads, outcomes = together(client.session)
    end(threads)
    assert len(set(outcomes)) == 1
    assert len(client.engine.sessions.beats()) == 1


def test_a_session_of_a_store_that_was_closed_meanwhile_ends(client, monkeypatch):
    user = User()
    client.attach(user, timeout_s=DEADLINE_S)
    opened = []
    open_session = client_module.open_session

    def open_and_close(*args):
        opened.append(open_session(*args))
        client.close()
        return opened[0]

    monkeypatch.setattr(client_module, "open_session", open_and_close)
    with pytest.raises(StoreUnavailable, match="closed"):
        client.session()
    assert not any(thread.is_alive() for thread in opened[0].threads)


def test_a_session_whose_threads_are_interrupted_ends(client, monkeypatch):
    """The first beat for ever, for a session that nothing used."""
    client.attach(user := User(), timeout_s=DEADLINE_S)
    started = []

    def start(thread):
        thread.start()
        started.append(thread)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(session_threads, "start", start)
        with pytest.raises(Interrupted):
            client.session()
    (thread,) = started
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert client.session()
    client.detach(user)


def test_an_interrupted_opening_keeps_no_other_thread_out(client, monkeypatch):
    def interrupted(*_, **__):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(connect, "open_store", interrupted)
        with pytest.raises(Interrupted):
            client.attach(User(), timeout_s=DEADLINE_S)
    assert not client._users
    user = User()
    threads, outcomes = together(lambda: client.attach(user, timeout_s=DEADLINE_S))
    end(threads)
    assert outcomes == [None] * THREADS
