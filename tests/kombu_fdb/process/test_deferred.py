"""What another thread does later (Client.later): what finalizers leave, and what a store did that was away."""

import threading
from collections import deque

import pytest
from kit.faults import Interrupted
from kit.frames import keeps_frames

from kombu_fdb import Broker
from kombu_fdb.errors import LimitExceeded, StoreFull, StoreUnavailable
from kombu_fdb.model import Lease
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.process.session_threads import DeferredCalls, OnDemandThread
from kombu_fdb.testing.stores import MemoryStores

DEADLINE_S = 60.0


@pytest.fixture
def calls():
    return DeferredCalls()


@pytest.fixture
def broker():
    with MemoryStores(), Broker.open(f"fdb+memory://{random_id().hex()}") as broker:
        yield broker


class Call:
    """Tells when it was begun, ends when it is told to, and counts."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.times = 0

    def __call__(self):
        self.times += 1
        self.begun.set()
        assert self.may_end.wait(DEADLINE_S)


def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def end(*threads):
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def full():
    """As for a dead letter."""
    error = StoreFull()
    error.fills = True
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(LimitExceeded(), ["second"], id="a hopeless one delays no other"),
        pytest.param(full(), ["second"], id="others may fit on a full disk"),
        pytest.param(StoreUnavailable(), [], id="nothing is tried while the store is away"),
    ],
)
def test_an_call_that_fails(calls, error, expected):
    done = []
    errors = [error]

    def fails_once():
        if errors:
            raise errors.pop()
        done.append("first")

    calls.add(fails_once)
    calls.add(lambda: done.append("second"))
    with pytest.raises(type(error)):
        calls.run()
    assert done == expected
    calls.run()
    assert sorted(done) == ["first", "second"]
    assert not calls


def test_a_failed_call_lets_the_callers_go(calls):
    calls.add(lambda: {}["no such key"])
    calls.add(lambda: 1 / 0)
    assert not keeps_frames(calls.run)


def test_two_threads_run_each_call_once(calls):
    """After a fence there are two duties threads for a while."""
    first, second = Call(), Call()
    second.may_end.set()
    calls.add(first)
    calls.add(second)
    slow = start(calls.run)
    assert first.begun.wait(DEADLINE_S)
    end(start(calls.run))
    assert (first.times, second.times) == (1, 1)
    assert calls, "the first one is still under way"
    first.may_end.set()
    end(slow)
    assert (first.times, second.times) == (1, 1)
    assert not calls


def test_an_call_that_is_interrupted_is_run_again(calls):
    def interrupted():
        raise Interrupted

    calls.add(interrupted)
    with pytest.raises(Interrupted):
        calls.run()
    assert calls
    with pytest.raises(Interrupted):
        calls.run()


def test_what_another_thread_hands_back_first_is_no_error(broker, monkeypatch):
    """A thread that saw one more message than there is kept those it had taken out of the list."""

    class Raced(deque[Lease]):
        def __bool__(self):
            return True

    released = []

    def release(leases, **_):
        released.extend(leases)
        return [True] * len(leases)

    monkeypatch.setattr(broker._engine.messages, "release", release)
    monkeypatch.setattr(broker._client, "_returns", Raced([Lease(b"s", 1)]))
    broker._client._release_pending()
    assert released == [Lease(b"s", 1)]


@pytest.mark.parametrize("error", [StoreUnavailable, LimitExceeded, Interrupted])
def test_what_can_not_be_handed_back_now_is_kept(broker, monkeypatch, error):
    leases = [Lease(b"s", number) for number in range(700)]

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(broker._engine.messages, "release", fail)
        patch.setattr(broker._client, "nudge", lambda: None)  # or another thread meets the error, too
        broker._client._returns.extend(leases)
        with pytest.raises(error):
            broker._client._release_pending()
        assert list(broker._client._returns) == leases
        broker._client._returns.clear()
        with pytest.raises(error):
            broker._client.release(leases)
        assert list(broker._client._returns) == leases
    broker._client._release_pending()
    assert not broker._client._returns


@pytest.mark.parametrize("session", [True, False], ids=["with a session", "without"])
def test_the_end_waits_for_what_was_begun(broker, session):
    """And gives it the store until it is done."""
    own, call, counts = broker._client, Call(), []
    client_session = own.session() if session else None

    def work():
        call()
        counts.append(own.engine.inspect.counts("q").ready)

    own.later(work)
    assert call.begun.wait(DEADLINE_S)
    closing = start(own.close)
    if client_session is not None:
        assert client_session.ended.wait(DEADLINE_S)
    call.may_end.set()
    end(closing)
    assert counts == [0]
    assert not own.deferred_calls


def test_what_is_left_at_the_end_is_done(broker):
    counts = []
    own = broker._client
    own.deferred_calls.add(lambda: counts.append(own.engine.inspect.counts("q").ready))
    own.close()
    assert counts == [0]


def test_an_end_with_a_hopeless_call(broker, caplog):
    def hopeless():
        raise LimitExceeded

    broker._client.deferred_calls.add(hopeless)
    broker._client.close()
    assert "1 deferred call(s) are not done" in caplog.text
    assert broker._client.engine_if_open is None


def test_a_thread_that_was_asked_for_and_has_not_begun_is_waited_for(monkeypatch):
    """A finalizer has just asked for it when the client closes its store."""
    asked = []
    monkeypatch.setattr("_thread.start_new_thread", lambda begin, _arguments: asked.append(begin))
    thread = OnDemandThread(lambda: None)
    thread.call()
    assert not thread.stop(0.01)
    monkeypatch.undo()
    asked[0]()
    assert thread.stop(60)


def test_a_declaration_within_a_deferred_call_does_not_wait_for_itself(broker):
    """As that of a signal handler, which has interrupted the call."""
    client = broker._client
    client.deferred_calls.add(client.make_deferred_calls)
    client._run_deferred()
    assert not client.deferred_calls
