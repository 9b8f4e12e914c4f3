"""Interruption: exceptions that may come at any line; and locks and thread starts that survive them.

Python runs signal handlers between any two calls, so an exception from one (a soft time limit, ``KeyboardInterrupt``)
may come at any line, as may one that kills a greenlet. The packages survive it by four rules:

1. *One call into C.* An item with one owner at a time (an ack, a claim) passes to the next owner in a single call, such
   as :func:`move`, during which no handler runs. It goes ``into`` a list that the next owner already has: a function's
   return value is lost if an exception comes before its caller has assigned it.
2. *The new owner first.* If that takes two calls, the item is in both places in between, or in a state of its own
   (*arriving*, *leaving*, *under way*, *suspect*), and the next turn or call continues from there. Repeating a step is
   harmless.
3. *Undone twice.* :func:`surely` undoes what must not outlive a call, such as a lock, a second time if necessary: one
   exception can't interrupt both.
4. *No wait for itself.* A handler runs inside the code that it interrupts, which resumes only when the handler has
   ended. So a lock that this thread already has or waits for is refused at once (:class:`Lock`, :attr:`FairLock.mine`).

``tests/kit/interruption.py`` raises an exception at each line in turn.

Model of the lock. An exception may come between taking a lock and noting that it was taken; hence there is no separate
note here. A thread that wants the lock makes a :class:`Ticket` and appends it to a queue, in one call into C; *the head
of the queue has the lock*. Releasing the lock means removing the ticket and waking the new head. Both may be repeated,
even for a ticket that was never in the queue, so :meth:`FairLock.release` repairs whatever an interrupted ``acquire``
or ``release`` has left behind. (``with`` on a ``threading.Lock`` depends on where the interpreter looks for signals; a
``Condition`` is not safe, as its own methods can be interrupted.)
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # C; ``signal`` wraps it with enums, which takes ten times as long
import importlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from operator import attrgetter
from typing import TypeVar

from kombu_fdb.errors import StoreError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock

T = TypeVar("T")


def surely(work: Callable[[], T], undo: Callable[[], object]) -> T:
    """Do ``work``, and in any case ``undo`` afterwards: twice, if an exception may have interrupted it."""
    try:
        try:
            return work()
        finally:
            undo()
    except BaseException:
        undo()
        raise


def move(source: deque[T], target: list[T], most: int | None = None) -> bool:
    """Move items from the front, up to ``most``, to the end of ``target``. False if ``target`` is then empty.

    In one call into C, which no thread or signal handler can interrupt: each item is in exactly one of the two.
    """
    try:  # noqa: SIM105 - suppress is Python
        target.extend(islice(iter(source.popleft, None), most))
    except IndexError:  # no more items; the earlier ones are in the target
        pass
    return bool(target)


#: The signals that end programs, including Celery's workers.
ENDING = tuple(getattr(_signal, name) for name in ("SIGINT", "SIGTERM", "SIGQUIT") if hasattr(_signal, name))


def undisturbed(work: Callable[[], T], signals: Iterable[int] = ENDING) -> T:
    """Do ``work``; in the main thread, the handlers of these signals run after it. Raises what they raise.

    ``work`` must be short, and the handlers must have been set from Python, as Celery's are.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    handlers: dict[int, Callable[..., object]] = {}
    came: deque[int] = deque()
    pid = os.getpid()

    def note(number: int, frame: object) -> None:
        if os.getpid() == pid:
            came.append(number)
        else:  # in a child that another thread has just forked
            handlers[number](number, frame)

    def hold() -> T:
        for number in signals:
            handler = _signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
                handlers[number] = _signal.signal(number, note)  # a handler that came just before may have set it
        return work()

    def reinstall() -> None:
        for number, handler in handlers.items():
            if _signal.getsignal(number) is note:  # else an earlier handler has set another
                _signal.signal(number, handler)
        while came:
            handler = _signal.getsignal(number := came.popleft())
            if callable(handler):
                handler(number, sys._getframe())

    return surely(hold, reinstall)


def would_wait_for_itself() -> StoreError:
    return StoreError(
        "this thread has a write transaction open already, and would wait for itself",
        fix="End that transaction first, or write in another thread: a signal handler or a callback that runs "
        "inside a transaction must not use the broker.",
    )


class Lock:
    """A lock for a ``with`` around lines that don't wait. Raises ``StoreError`` in a thread that already has it.

    Inside is an ``RLock``, as only that type knows its owner. ``with`` calls the methods of *that*: they are C, so no
    signal handler's exception comes between the lock and its release; a Python method would let one in.
    """

    __slots__ = ("reentrant",)

    def __init__(self) -> None:
        #: For lines that may run inside the same lines, further up the stack.
        self.reentrant = threading.RLock()

    @property
    def __enter__(self) -> Callable[[], bool]:
        if self.reentrant._is_owned():  # type: ignore[attr-defined]  # not in the stubs; conditions are built on it
            raise would_wait_for_itself()
        return self.reentrant.__enter__

    __exit__ = property(attrgetter("reentrant.__exit__"))


# -- the lock ----------------------------------------------------------------------------------------------------------


class Signal:
    """Wakes one sleeping thread. Each method is one call into C, and setting it is idempotent."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        try:  # noqa: SIM105 - suppress is Python, and can be interrupted
            self._lock.release()
        except RuntimeError:  # it is set already
            pass

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until it is set, and unset it. False if it was not set within ``timeout_s`` (None: no limit)."""
        return self._lock.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0))


class Ticket:
    """A place in the queue for a lock. Used once."""

    # Class attributes, and no ``__init__``: one is made for each transaction.
    _signal: Signal | None = None
    #: Whether its owner has begun to leave.
    over = False
    #: The thread or greenlet that it belongs to.
    thread = 0

    def listen(self) -> Signal:
        """Call it before the check that decides whether to sleep: no later wake-up is lost."""
        if self._signal is None:
            self._signal = Signal()
        return self._signal

    def wake(self) -> None:
        signal = self._signal
        if signal is not None:
            signal.set()


class FairLock:
    """A lock that its waiters get in the order of their arrival; for threads and greenlets."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._queue: deque[Ticket] = deque()

    def __len__(self) -> int:
        """How many tickets have it or wait for it."""
        return len(self._queue)

    @property
    def head(self) -> Ticket | None:
        """The ticket that has the lock."""
        try:
            return self._queue[0]
        except IndexError:
            return None

    def acquire(self, ticket: Ticket, timeout_s: float) -> bool:
        """Take the lock. False if that takes over ``timeout_s``, or if it is :attr:`mine`; then ``ticket`` has left."""
        queue, ticket.thread = self._queue, threading.get_ident()
        queue.append(ticket)
        return queue[0] is ticket or self._wait(ticket, self._clock.monotonic() + timeout_s)

    @property
    def mine(self) -> bool:
        """Whether this thread, or greenlet, has it or waits for it, further up the stack."""
        thread = threading.get_ident()
        return any(each.thread == thread for each in list(self._queue))

    def release(self, ticket: Ticket) -> None:
        """Leave the queue, whether ``ticket`` has the lock, waits for it, has left or was never there."""
        ticket.over = True
        try:  # noqa: SIM105 - suppress takes longer than all of this
            self._queue.remove(ticket)
        except ValueError:
            pass
        if self._queue and (head := self.head) is not None:
            head.wake()

    def run(
        self, work: Callable[[], T], timeout_s: float, late: str = "another thread of this process hangs in the store"
    ) -> T:
        """Do ``work`` with the lock.

        Raises ``StoreUnavailable`` with the text ``late`` if it was not free within ``timeout_s`` seconds, and
        ``StoreError`` if it is :attr:`mine`.
        """
        ticket = Ticket()

        def in_turn() -> T:
            if not self.acquire(ticket, timeout_s):
                raise would_wait_for_itself() if self.mine else StoreUnavailable(late)
            return work()

        return surely(in_turn, lambda: self.release(ticket))

    def _wait(self, ticket: Ticket, deadline: float) -> bool:
        signal = ticket.listen()
        others = [each.thread for each in list(self._queue) if each is not ticket]
        while self.head is not ticket and ticket.thread not in others:
            if not signal.wait(deadline - self._clock.monotonic()):
                break
        if self.head is ticket:
            return True
        self.release(ticket)
        return False


# -- threads and greenlets ---------------------------------------------------------------------------------------------


def start(thread: threading.Thread) -> None:
    """``thread.start()``, not interrupted by signal handlers.

    A handler's exception inside ``Thread.start`` of ``threading.py`` may become a ``KeyError`` or a ``RuntimeError``,
    in which Celery would not recognise its soft time limit, and may end the new thread.
    """
    undisturbed(thread.start, _signal.valid_signals())


def instead_of_threads() -> str:
    """``"gevent"`` or ``"eventlet"`` if it has replaced threads with greenlets, else ""."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    return "eventlet" if eventlet is not None and eventlet.is_monkey_patched("thread") else ""


def start_native(run: Callable[[], object]) -> None:
    """Run ``run`` in a native thread, even if gevent has replaced threads. It keeps no process alive."""
    importlib.import_module("gevent.monkey").get_original("_thread", "start_new_thread")(run, ())


def in_hub() -> bool:
    """Whether this runs in the event loop of gevent or eventlet, which runs signal handlers and must not wait."""
    gevent, eventlet, hubs = (sys.modules.get(name) for name in ("gevent", "eventlet", "eventlet.hubs"))
    if gevent is not None and isinstance(gevent.getcurrent(), gevent.hub.Hub):
        return True
    hub = getattr(getattr(hubs, "_threadlocal", None), "hub", None)  # get_hub would create one for this thread
    return eventlet is not None and hub is not None and hub.greenlet is eventlet.getcurrent()
