"""Tasks that are cancelled at any await, loops that are closed, forks: no job is lost or held without an owner."""

import asyncio
import concurrent.futures
import gc
import inspect
import os
import signal
import threading
import time
import types
import weakref
from contextlib import suppress

import pytest
from kit.processes import fork, until

from kombu_fdb import Broker, LeaseLost, StoreUnavailable, aio
from kombu_fdb.aio import Calls
from kombu_fdb.errors import ForkedError, InvalidArgument

PATIENCE_S = 60.0
MOST_AWAITS = 100


@pytest.fixture
def sync(any_store):
    with Broker.open(any_store, poll_interval=3600.0) as broker:
        yield broker


@pytest.fixture
def submitted(monkeypatch):
    """Every call that was given to a thread."""
    futures, submit = [], Calls.submit

    def submit_and_note(calls, function):
        futures.append(submit(calls, function))
        return futures[-1]

    monkeypatch.setattr(Calls, "submit", submit_and_note)
    return futures


def settle_down(submitted):
    """What the threads do; what they leave, the duties thread does at once."""
    concurrent.futures.wait(submitted, PATIENCE_S)
    submitted.clear()


def check_at_rest(sync, queue, ready):
    """Nothing is held, no take waits, and no attempt is counted."""
    until(lambda: (queue.stats().ready, queue.stats().leased) == (ready, 0))
    assert all(each.redeliveries == 0 for each in queue.peek(9))
    until(lambda: not sync.connection.held and not sync.connection.sleepers)
    client_session = sync.connection.client._session
    until(lambda: client_session is None or (not client_session.known and not client_session.consumed))


@types.coroutine
def _step(coroutine, leave_at, how):
    """Drive a coroutine as a task does, and have it left at its so many-th await. Returns whether it got there."""
    error = None
    for number in range(1, MOST_AWAITS):
        try:
            awaited = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return False, stop.value
        if number < leave_at:
            error = None
            try:
                yield awaited
            except BaseException as thrown:  # of asyncio.timeout(), which cancels the task that drives
                error = thrown
            continue
        if how == "when it is done":  # cancelled when the answer is on its way to the task
            yield awaited
        elif awaited is not None:
            awaited.cancel()
            awaited._asyncio_future_blocking = False
        if how == "thrown away":
            coroutine.close()
            return True, None
        with pytest.raises(asyncio.CancelledError):
            coroutine.throw(asyncio.CancelledError())
        return True, None
    raise AssertionError("the call has no end")


async def left_at(coroutine, number, how):
    return await _step(coroutine, number, how)


HOW = ("at once", "when it is done", "thrown away")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("take", ["take", "take_many", "consume"])
def test_a_take_that_is_left_at_any_await_holds_nothing(sync, submitted, jobs_are_kept, how, take):
    jobs = sync.queue("jobs")
    jobs.put_many("abc")

    def begin(queue):
        if take == "consume":
            return queue.consume(timeout=PATIENCE_S).__anext__()
        return queue.take(PATIENCE_S) if take == "take" else queue.take_many(2, PATIENCE_S)

    async def main():
        broker = aio.Broker(sync)
        for number in range(1, MOST_AWAITS):
            left, taken = await left_at(begin(broker.queue("jobs")), number, how)
            if not left:
                assert (taken[0] if take == "take_many" else taken).payload == b"a"
                return number
            settle_down(submitted)
            check_at_rest(sync, jobs, 3)
        return None

    assert asyncio.run(main()) >= 2


@pytest.mark.parametrize("how", ["at once", "thrown away"])
def test_a_waiting_take_that_is_left_at_any_await_leaves_no_waiter(sync, submitted, how):
    jobs = sync.queue("jobs")

    async def main():
        broker = aio.Broker(sync)
        await broker.queue("jobs").take(0)
        for number in range(1, 20):
            left, _ = await left_at(broker.queue("jobs").take(0.2), number, how)
            settle_down(submitted)
            check_at_rest(sync, jobs, 0)
            if not left:
                return number
        return None

    assert asyncio.run(main()) >= 4, "a look, the arming, the sleep, another look"


@pytest.mark.parametrize("any_store", ["memory"], indirect=True)
def test_a_broker_needs_a_thread(sync):
    for threads in (0, -1, 1.5, "8", True, None):
        with pytest.raises(InvalidArgument, match="at least 1"):
            aio.Broker(sync, threads=threads)
        with pytest.raises(InvalidArgument, match="at least 1"):
            aio.Broker.open("fdb+sqlite://", threads=threads)


@pytest.mark.parametrize("threads", [1, 8])
def test_cancelled_tasks_lose_no_job(sync, submitted, threads):
    """Many tasks take and are cancelled as jobs come; what is not handed over comes back uncounted."""
    jobs, number = sync.queue("jobs"), 60
    taken = []

    async def work(queue):
        job = await queue.take()
        taken.append(job.payload)
        await job.ack()

    async def main():
        async with aio.Broker(sync, threads=threads) as broker:
            queue = broker.queue("jobs")
            tasks = [asyncio.create_task(work(queue)) for _ in range(number)]
            for each in range(number // 2):
                await queue.put(str(each))
                tasks[each * 2].cancel()
            await asyncio.wait(tasks, timeout=0.05)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            settle_down(submitted)
            until(lambda: jobs.stats().leased == 0)
            rest = await queue.take_many(number, 0)
            assert sorted(int(each) for each in [*taken, *(job.payload for job in rest)]) == list(range(number // 2))
            assert all(job.attempts == 1 for job in rest)

    asyncio.run(main())


def test_a_thousand_tasks_wait_in_a_few_threads(sync):
    async def main():
        async with aio.Broker(sync, threads=2) as broker:
            queue = broker.queue("jobs")
            tasks = [asyncio.create_task(queue.take()) for _ in range(1_000)]
            await asyncio.to_thread(until, lambda: len(sync.connection.sleepers) == len(tasks))
            for task in tasks[1:]:
                task.cancel()
            await asyncio.wait(tasks[1:])
            await queue.put("a")
            job = await asyncio.wait_for(tasks[0], PATIENCE_S)
            assert job.payload == b"a"
            await job.ack()

    asyncio.run(main())
    threads = [each.name for each in threading.enumerate() if each.name.startswith("kombu-fdb-aio")]
    assert len(threads) <= 2


def test_the_loop_runs_while_the_store_works(sync, monkeypatch):
    """A store that takes its time holds up a thread, not the loop."""
    answer = threading.Event()
    monkeypatch.setattr(sync.connection.engine.inspect, "counts", lambda queue: answer.wait(PATIENCE_S))

    async def main():
        async with aio.Broker(sync) as broker:
            counting = asyncio.create_task(broker.queue("jobs").stats())
            await asyncio.sleep(0)
            assert not counting.done()
            answer.set()  # only a loop that runs gets here
            assert await counting

    asyncio.run(main())


@pytest.mark.parametrize("how", ["ack", "release", "bury", "block"])
def test_a_settlement_is_done_although_its_task_is_cancelled(sync, submitted, jobs_are_kept, how):
    jobs = sync.queue("jobs")
    jobs.put("a")

    async def leave(job):
        async with job:
            pass

    async def main():
        broker, free = aio.Broker(sync, threads=1), threading.Event()
        job = await broker.queue("jobs").take(0)
        broker._calls.submit(lambda: free.wait(PATIENCE_S))  # so that it stands in a queue when it is cancelled
        left, _ = await left_at(leave(job) if how == "block" else getattr(job, how)(), 1, "at once")
        assert left
        await asyncio.sleep(0)  # the cancellation reaches the call
        free.set()
        settle_down(submitted)
        assert job._sync._ended

    asyncio.run(main())
    assert (jobs.stats().ready, jobs.stats().leased) == (how == "release", 0)


def test_a_block_that_is_cancelled_releases_its_job(sync):
    jobs = sync.queue("jobs")
    jobs.put("a")

    async def work(broker, began):
        async with await broker.queue("jobs").take(0):
            began.set()
            await asyncio.Event().wait()

    async def main():
        async with aio.Broker(sync) as broker:
            began = asyncio.Event()
            task = asyncio.create_task(work(broker, began))
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (jobs.stats().ready, jobs.stats().leased) == (1, 0)
            assert jobs.peek()[0].redeliveries == 1, "it had begun"

    asyncio.run(main())


def test_a_replay_that_is_cancelled_ends_between_two_transactions(sync, submitted):
    jobs = sync.queue("jobs")
    for _ in range(20):
        jobs.put("a")
        jobs.take(0).bury()
    moved = []

    async def main():
        broker, first = aio.Broker(sync), asyncio.Event()
        loop = asyncio.get_running_loop()

        def progress(number):
            moved.append(number)
            loop.call_soon_threadsafe(first.set)

        replay = asyncio.create_task(broker.queue("jobs").dead_letters.replay(rate=0.001, progress=progress))
        await first.wait()
        replay.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replay
        concurrent.futures.wait(submitted, PATIENCE_S)
        assert all(each.done() for each in submitted)

    asyncio.run(main())
    assert moved == [1]
    assert jobs.count() == 1


# -- the ends ----------------------------------------------------------------------------------------------------------


def test_an_error_in_a_broker_s_block_closes_it_and_comes_out(any_store):
    async def main():
        with pytest.raises(ZeroDivisionError):
            async with aio.Broker.open(any_store) as broker:
                jobs = broker.queue("jobs")
                await jobs.put("a")
                held = [await jobs.take(0)]
                1 / len(held[1:])
        with pytest.raises(StoreUnavailable, match="closed"):
            await jobs.count()
        await broker.close()

    asyncio.run(main())
    with Broker.open(any_store) as broker:
        assert broker.queue("jobs").peek()[0].redeliveries == 0, "released uncounted"


@pytest.mark.parametrize("settle", ["ack", "extend"])
def test_a_job_that_is_dropped_after_an_error_goes_back(sync, monkeypatch, settle):
    """At once, and not when Python looks for garbage."""

    def fail(*_):
        raise StoreUnavailable

    async def main():
        jobs = aio.Broker(sync).queue("jobs")
        await jobs.put("a")
        job = await jobs.take()
        with monkeypatch.context() as away:
            for verb in ("ack", "holds"):
                away.setattr(sync.connection.engine.messages, verb, fail)
            with suppress(StoreUnavailable):
                await getattr(job, settle)()
        gone = weakref.ref(job._sync)
        del job
        deadline = time.monotonic() + PATIENCE_S
        while gone() is not None:  # the thread of the call, and the loop, are on their way out of it
            assert time.monotonic() < deadline, "waited in vain"
            await asyncio.sleep(0.002)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_an_opening_that_fails_is_an_error_of_the_block(tmp_path):
    async def main():
        with pytest.raises(StoreUnavailable):
            async with aio.Broker.open(f"fdb+sqlite:///{tmp_path}/no/such/folder/b.db"):
                raise AssertionError("open")

    asyncio.run(main())


@pytest.mark.parametrize("how", HOW)
def test_an_opening_that_is_left_leaves_nothing_open(any_store, submitted, how):
    from kombu_fdb.process.client import _registry

    async def main():
        opening = aio.Broker.open(any_store, ack_delay_ms=7.5)
        left, _ = await left_at(opening._opened(), 1, how)
        assert left
        settle_down(submitted)

    asyncio.run(main())
    gc.collect()
    own = [each for (_, _, options), each in list(_registry.items()) if options.ack_delay_ms == 7.5]
    assert own
    until(lambda: all(each.engine_if_open is None for each in own))


def test_a_loop_that_was_closed_leaves_its_jobs_and_they_go_back(sync, submitted):
    jobs = sync.queue("jobs")
    jobs.put_many("ab")
    broker = aio.Broker(sync)
    loop = asyncio.new_event_loop()
    job = loop.run_until_complete(broker.queue("jobs").take(0))
    waiting = loop.create_task(broker.queue("empty").take())
    while not sync.connection.sleepers:
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    sync.queue("empty").put("rings at a loop that is closed")
    assert job.payload == b"a"
    waiting._log_destroy_pending = False
    del job, waiting
    settle_down(submitted)
    gc.collect()
    until(lambda: (jobs.stats().ready, jobs.stats().leased) == (2, 0))
    until(lambda: gc.collect() is not None and not sync.connection.sleepers)

    async def again():
        taken = await broker.queue("jobs").take_many(2, 0)
        assert sorted(each.payload for each in taken) == [b"a", b"b"]
        assert await broker.queue("empty").count() == 1
        for each in taken:
            await each.ack()

    asyncio.run(again())


def test_a_job_is_lost_as_in_a_thread(sync):
    async def main():
        async with aio.Broker(sync) as broker:
            jobs = broker.queue("jobs")
            job_id = await jobs.put("a")
            job = await jobs.take(0)
            await jobs.delete(job_id)
            with pytest.raises(LeaseLost):
                await job.extend()
            with pytest.raises(LeaseLost):
                await job.ack()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_and_does_no_harm(tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    sync = Broker.open(url)
    broker = aio.Broker(sync)
    jobs = broker.queue("jobs")

    async def hold():
        await jobs.put("a")
        return await jobs.take(0)

    async def use():
        for call in (jobs.count, job.ack, jobs.take, lambda: jobs.put("b")):
            with pytest.raises(ForkedError):
                await call()
        await broker.close()
        async with aio.Broker.open(url) as own:
            assert await own.queue("jobs").take(0) is None

    job = asyncio.run(hold())
    child = fork(lambda: asyncio.run(use()))
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    asyncio.run(job.ack())
    sync.close()


def test_signals_end_a_loop(sync):
    async def main():
        async with aio.Broker(sync) as broker:
            jobs = broker.queue("jobs").consume()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, jobs.stop)
            looped = asyncio.create_task(_count(jobs))
            await asyncio.to_thread(until, lambda: sync.connection.sleepers)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert await asyncio.wait_for(looped, PATIENCE_S) == 0

    asyncio.run(main())


async def _count(jobs):
    return len([job async for job in jobs])


def test_verbs_say_what_they_are():
    assert inspect.iscoroutinefunction(aio.Queue.put)
    assert "Store a job" in aio.Queue.put.__doc__
    assert inspect.isasyncgenfunction(aio.DeadLetters.each)
