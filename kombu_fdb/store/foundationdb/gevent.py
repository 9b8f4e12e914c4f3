"""The binding under gevent: a real network thread, and waits that let other greenlets run.

The binding has an event model for gevent, from before ``threading`` could be patched: its network thread would be a
greenlet, and the first call would stop the whole process for ever. Eventlet has no way to be called back from a thread
that it does not know, so a process patched by it is refused.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.primitives.threads import instead_of_threads, start_native


def adapt(impl: Any) -> None:
    """Make the module ``fdb.impl`` fit the process: nothing to do where threads are threads."""
    replaced_by = instead_of_threads()
    if replaced_by == "eventlet":
        raise StoreUnavailable(
            "FoundationDB can't be used in a process patched by eventlet",
            fix="Use another pool (`--pool gevent`, `threads` or `prefork`)",
        )
    if replaced_by == "gevent":
        _wait_in_greenlets(impl)
        impl.init = lambda **_: _start_network(impl)


def _wait_in_greenlets(impl: Any) -> None:
    gevent: Any = importlib.import_module("gevent")
    new_event = importlib.import_module("gevent.event").Event

    # Runs its callback in the network thread, where nothing of gevent may be touched but ``send``.
    call_back = impl.Future.on_ready

    def in_loop(future: Any, action: Callable[[], object], *, ref: bool) -> None:
        """Run ``action`` in this thread's event loop when the future is ready."""
        signal = gevent.get_hub().loop.async_(ref=ref)

        def finish() -> None:
            signal.stop()
            signal.close()
            action()

        signal.start(finish)
        call_back(future, lambda _: signal.send())

    def block_until_ready(future: Any) -> None:
        if not future.is_ready():
            ready = new_event()
            in_loop(future, ready.set, ref=True)
            ready.wait()

    def on_ready(future: Any, callback: Callable[[Any], None]) -> None:
        # Not a reason to keep the loop alive, and in a greenlet of its own: the callback may wait for a lock.
        in_loop(future, lambda: gevent.spawn(callback, future), ref=False)

    impl.Future.block_until_ready = block_until_ready
    impl.Future.on_ready = on_ready


class _NetworkThread:
    """What the binding needs to know of its thread."""

    daemon = True

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._ended = importlib.import_module("gevent.monkey").get_original("_thread", "allocate_lock")()
        self._ended.acquire()
        self._pid = os.getpid()
        start_native(self._work)

    def is_alive(self) -> bool:
        return bool(self._pid == os.getpid() and self._ended.locked())

    def join(self) -> None:
        if self.is_alive():
            self._ended.acquire()

    def _work(self) -> None:
        try:
            self._run()
        finally:
            self._ended.release()


def _start_network(impl: Any) -> None:
    if impl._network_thread:
        raise impl.FDBError(2000)
    impl._capi.fdb_setup_network()
    impl._network_thread = _NetworkThread(impl._capi.fdb_run_network)
