"""A store whose answers come late, or never, in no time: for how long a call may take (BOUNDED).

Model. A transaction of a program's thread is *quick* at first. From a given one on, each takes as long as it was given,
and then answers (``LATE``), has said nothing (``SILENT``), or has read all and said nothing of its commit (``UNSURE``).
Nothing waits for that, nor for a bell that is not rung at once: the program's clocks stand still, and are set forth by
as much instead. A session's own threads are no part of a call: they are not started. Threads of other tests, which may
still be about to end, keep the real clock.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

import pytest

from kombu_fdb.aio import LoopBell
from kombu_fdb.errors import CommitUnknown, StoreUnavailable
from kombu_fdb.primitives import wakeup
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.wakeup import Bell
from kombu_fdb.process import connect, session_threads
from kombu_fdb.process.session_threads import OnDemandThread
from kombu_fdb.testing.stores import MemoryStores
from kombu_fdb.transport.consuming import receiver

#: The thread of a connection that consumes is no caller.
RECEIVER = "kombu-fdb-receiver"
#: In truth, in seconds: what another thread does at once has come then.
MOMENT_S = 0.0005
#: Of the time that it was given: an answer that comes later is none.
LAST_MOMENT = 0.999


_wait_for = wakeup.wait_for
_monotonic, _sleep = time.monotonic, time.sleep


class Lateness(Enum):
    """What becomes of a transaction that takes all of its time."""

    LATE = "answered at the last moment"
    SILENT = "not answered"
    UNSURE = "commit not answered"


class LateStore:
    """Both kinds: ``writers_take_turns`` as a file has it."""

    def __init__(self, memory: MemoryStores, *, writers_take_turns: bool) -> None:
        self.writers_take_turns = writers_take_turns
        self._memory = memory
        self._lateness: Lateness | None = None
        self._quick = 0
        self._strangers = {*threading.enumerate()} - {threading.current_thread()}
        #: Transactions since :meth:`turn`.
        self.begun = 0
        #: By how much the clocks are ahead of where they began, in seconds.
        self.passed_s = 0.0

    def turn(self, lateness: Lateness | None, *, after: int = 0) -> None:
        """From here on, behind so many transactions."""
        self._lateness, self._quick, self.begun = lateness, after, 0

    def open(self, location: Any, options: object, timeout_s: float) -> Any:
        """To open it takes a transaction, as of a driver that asks once whether it answers."""
        opened = _Opened(self, self._memory.open(location.name))
        opened.begin(timeout_s=timeout_s).commit()
        return opened

    def _is_strange(self) -> bool:
        return threading.current_thread() in self._strangers

    def monotonic(self) -> float:
        return _monotonic() if self._is_strange() else 1_000.0 + self.passed_s

    def sleep(self, seconds: float) -> None:
        if self._is_strange():
            _sleep(seconds)
        else:
            self.passed_s += seconds

    def wait_for(self, bells: Sequence[Bell], timeout_s: float | None) -> bool:
        """As the real one."""
        if threading.current_thread().name == RECEIVER or self._is_strange():
            return _wait_for(bells, timeout_s)
        rung = _wait_for(bells, MOMENT_S)
        if not rung and timeout_s:
            self.sleep(timeout_s)
        return rung

    def next(self) -> Lateness | None:
        if threading.current_thread().name == RECEIVER:
            if self._lateness is not None and self.begun > self._quick:  # a commit of its own would be an answer
                raise StoreUnavailable("it does not answer")
            return None
        self.begun += 1
        return self._lateness if self.begun > self._quick else None


class _Opened:
    """An opening of it."""

    commit_may_be_unknown = True

    def __init__(self, store: LateStore, inner: Any) -> None:
        self.writers_take_turns = store.writers_take_turns
        self._store = store
        self._inner = inner

    def begin(self, *, timeout_s: float, read_only: bool = False) -> Any:
        lateness = self._store.next()
        if lateness is Lateness.SILENT:
            self._store.sleep(timeout_s)
            raise StoreUnavailable("it does not answer")
        if lateness is Lateness.LATE:
            self._store.sleep(timeout_s * LAST_MOMENT)
        inner = self._inner.begin(timeout_s=timeout_s, read_only=read_only)
        return _Unsure(self._store, inner, timeout_s) if lateness is Lateness.UNSURE else inner

    def close(self) -> None:
        self._inner.close()


class _Unsure:
    """A transaction whose commit is not answered; one that only reads is not answered either."""

    def __init__(self, store: LateStore, inner: Any, timeout_s: float) -> None:
        self._store = store
        self._inner = inner
        self._timeout_s = timeout_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def commit(self) -> None:
        self._store.sleep(self._timeout_s)
        if self._inner.read_only:
            raise StoreUnavailable("it does not answer")
        raise CommitUnknown(in_flight=True)


@contextmanager
def late_store(monkeypatch: pytest.MonkeyPatch, *, writers_take_turns: bool) -> Iterator[LateStore]:
    """The store behind ``fdb+memory://``, on whose clock the whole program is."""
    with MemoryStores() as memory, monkeypatch.context() as patch:
        store = LateStore(memory, writers_take_turns=writers_take_turns)
        patch.setattr(connect, "_open_database", store.open)
        patch.setattr(Clock, "monotonic", staticmethod(store.monotonic))
        patch.setattr(Clock, "sleep", staticmethod(store.sleep))
        for module in [each for name, each in sys.modules.items() if name.startswith("kombu_fdb.")]:
            if getattr(module, "monotonic", None) is time.monotonic:
                patch.setattr(module, "monotonic", store.monotonic)
        for module in (wakeup, receiver):
            patch.setattr(module, "wait_for", store.wait_for)
        patch.setattr(LoopBell, "wait", _in_loop(store))
        for kind, verb in ((session_threads, "start_threads"), (OnDemandThread, "call")):
            patch.setattr(kind, verb, _nothing)
        gc.disable()  # an old connection that is collected here would end its session on this clock
        try:
            yield store
        finally:
            gc.enable()


def _in_loop(store: LateStore) -> Callable[[LoopBell, float], Coroutine[Any, Any, None]]:
    """As :meth:`LateStore.wait_for`, of a sleeper in an event loop."""

    async def wait(bell: LoopBell, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                await bell._rung.wait()
        if not bell._rung.is_set():
            store.sleep(timeout_s)

    return wait


def _nothing(*_: object) -> None: ...
