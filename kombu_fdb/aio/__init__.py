"""The broker for asyncio: the same verbs as :mod:`kombu_fdb`'s, to be awaited.

::

    async with aio.Broker.open("fdb+sqlite:////var/lib/app/broker.db") as broker:
        jobs = broker.queue("jobs")
        await jobs.put("build 42", key="alice")
        async for job in jobs.consume(timeout=10):
            async with job:  # acked, or released if an exception comes out
                await build(job.payload)

Model. An async object is the *face* of a sync one and holds nothing of its own. A call runs in one of the broker's few
threads (``calls.py``), and only for as long as the store needs; a ``take`` that waits sleeps in the event loop and is
woken by the store's watches (``taking.py``), so a thousand tasks may wait. Functions given to a verb (``where``,
``progress``, ``stop``) are called in those threads.

Cancelling, at any ``await``:

* a ``take``: what it has claimed, or is about to, goes back at once, and no attempt counts;
* a settlement (``ack``, ``release``, ``bury``, the end of ``async with``, ``close``): it is done all the same;
* another verb: it is not begun if no thread was free yet, else it runs to its end; a ``replay`` or ``discard`` ends
  between two transactions.

Nothing here belongs to an event loop: a broker may be used from one after the other. A loop that was closed has only
left its jobs, which go back when they are unreferenced. In a forked child every call raises ``ForkedError``.
"""

from kombu_fdb.aio.broker import Broker, Consumer, DeadLetters, Job, Queue

__all__ = ["Broker", "Consumer", "DeadLetters", "Job", "Queue"]
