"""The FoundationDB binding: found, checked, and made usable in this process, even after a fork and under gevent.

The binding's event model for gevent predates the patching of ``threading``: its network thread would be a greenlet, and
the first call would block the whole process forever. Here the binding gets a native network thread, and waits that let
other greenlets run. A thread unknown to eventlet can't call back into it, so a process patched by eventlet is refused.

Model. ``libfdb_c`` can be started once per process and never again; one network thread does its work. A child of a
process that started it inherits a library that believes it is running, but without the thread: every call would wait
forever. No call can repair that, but a *second copy* of the library is independent of the first. So:

* ``binding()`` is the only access to the module. In a process whose library is dead (started, but without a living
  thread) it loads a fresh copy of the library file, imports the binding's modules again so that they use it, and
  selects the API version. That takes some 40 ms, once per child. The new module is another object with other classes:
  it is never kept across calls.
* The linker recognises a library by its file, so each generation of children needs a file of its own. A parent that has
  started the library makes a copy in memory at its first fork; its children share that copy, but never with their own
  children. If that fails, or C code forks without Python's hooks, a child makes its own copy.
* The dead library must not be called: the parent's objects would call it when the child collects them, and so would its
  exit handler. After a fork both are disarmed.

The parent is not affected. What fails: if there is no room for 25 MB in memory, and no directory from which libraries
may be loaded (``noexec``), ``binding()`` raises ``StoreUnavailable``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from traceback import clear_frames
from types import ModuleType
from typing import Any

from kombu_fdb.errors import ClientUnusable, StoreUnavailable
from kombu_fdb.primitives.interruption import Signal, instead_of_threads, start_native

# -- gevent ------------------------------------------------------------------------------------------------------------


def adapt(impl: Any) -> None:
    """Adapt the module ``fdb.impl`` to the process."""
    _let_frames_go(impl)
    _wait_apart(impl)
    replaced_by = instead_of_threads()
    if replaced_by == "eventlet":
        raise StoreUnavailable(
            "FoundationDB can't be used in a process patched by eventlet",
            fix="Use another pool (`--pool gevent`, `threads` or `prefork`)",
        )
    if replaced_by == "gevent":
        _wait_in_greenlets(impl)
        impl.init = lambda **_: _start_network(impl)


def _let_frames_go(impl: Any) -> None:
    """Free the frame that a failed read of the binding keeps: one of its locals refers to the error.

    The error's traceback keeps the frame alive, and the frame keeps the error alive: a cycle, with the frames of all
    callers and what they hold. A job among these would stay leased until Python collects garbage.
    """
    wait = vars(impl.LazyFuture)["value"].method

    def value(future: Any) -> Any:
        try:
            return wait(future)
        except Exception as error:
            clear_frames(error.__traceback__)
            raise

    impl.LazyFuture.value = impl.replaceable_property(value)


def _wait_apart(impl: Any) -> None:
    """Give each wait a signal of its own; in the binding, all waits of a thread share one.

    After a signal handler's exception, that signal may be set later: then each further wait of the thread ends before
    its answer has arrived, and a commit that is still under way counts as failed.
    """

    def block_until_ready(future: Any) -> None:
        if not future.is_ready():
            ready = Signal()
            future.on_ready(lambda _: ready.set())
            if not future.is_ready():  # else called in this thread, where a signal handler may have interrupted it
                ready.wait(None)

    impl.Future.block_until_ready = block_until_ready


def _wait_in_greenlets(impl: Any) -> None:
    gevent: Any = importlib.import_module("gevent")
    new_event = importlib.import_module("gevent.event").Event

    # It runs its callback in the network thread, which must call nothing of gevent but ``send``.
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
            if not future.is_ready():  # as in :func:`_wait_apart`
                ready.wait()

    def on_ready(future: Any, callback: Callable[[Any], None]) -> None:
        # It must not keep the loop alive, and gets its own greenlet: the callback may wait for a lock.
        in_loop(future, lambda: gevent.spawn(callback, future), ref=False)

    impl.Future.block_until_ready = block_until_ready
    impl.Future.on_ready = on_ready


class _NetworkThread:
    """The parts of a thread that the binding uses."""

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


# -- the binding -------------------------------------------------------------------------------------------------------


#: The newest version that this driver was tested with.
API_VERSION = 730
#: The oldest version that has everything the driver uses.
OLDEST_API_VERSION = 630
#: The versions that bindings before 7.3 may know; these don't report their newest one.
OLDER_API_VERSIONS = (720, 710, 700, OLDEST_API_VERSION)

#: Linux's flag for executable files in memory, which Python does not name yet.
MFD_EXEC = 0x10

CLIENTS = "https://github.com/apple/foundationdb/releases"


class _Process:
    """What this process knows about the library; a single object, because a process has one library."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.module: ModuleType | None = None
        #: The process's id, and its network thread, which lives as long as the process.
        self.living: tuple[int, object] | None = None
        #: The file the first library came from.
        self.library = ""
        #: A copy in memory for the children of this process.
        self.spare_fd = -1


_process = _Process()


def binding() -> Any:
    """The ``fdb`` module with its API version selected. Raises ``ClientUnusable``, ``StoreUnavailable``."""
    with _process.lock:
        if _process.module is None or _is_dead():
            _process.module = _load()
        return _process.module


def _is_dead() -> bool:
    """Whether this process is a fork of the one that started the library.

    ``is_alive`` is called only once: after a signal handler's exception inside it, Python considers the thread dead.
    """
    impl = sys.modules.get("fdb.impl")
    thread = getattr(impl, "_network_thread", None)
    if thread is None or _process.living == (os.getpid(), thread):
        return False
    if thread.is_alive():
        _process.living = os.getpid(), thread
        return False
    return True


def _load() -> ModuleType:
    if not _is_dead():
        module = _import()
        _process.library = _process.library or _library_file(module)
        return module
    _disarm()
    try:
        return _import_from(_copy_in_memory())
    except (ClientUnusable, StoreUnavailable):  # the system runs no code from files in memory
        return _import_from(_copy_on_disk())


def _import_from(copy: contextlib.AbstractContextManager[str]) -> ModuleType:
    with copy as path, _redirected(path):
        for name in [name for name in sys.modules if name == "fdb" or name.startswith("fdb.")]:
            del sys.modules[name]
        return _import()


def _import() -> ModuleType:
    try:
        fdb = importlib.import_module("fdb")
        _select_api_version(fdb)
        adapt(sys.modules["fdb.impl"])
    except ImportError as error:
        raise ClientUnusable(
            "the FoundationDB binding is not installed",
            reason=str(error),
            fix="Run `pip install 'foundationdb==7.3.*'`",
        ) from error
    except ClientUnusable:
        raise
    except Exception as error:  # the class that the binding raises when it finds no library
        raise ClientUnusable(
            "the FoundationDB client library can't be loaded",
            reason=str(error),
            fix=f"Install the package foundationdb-clients of your cluster's version, which has libfdb_c ({CLIENTS})",
        ) from error
    return fdb


def _select_api_version(fdb: Any) -> None:
    by_application = fdb.is_api_version_selected()  # before us
    selected = fdb.get_api_version() if by_application else _select_newest(fdb)
    if selected < OLDEST_API_VERSION:
        raise ClientUnusable(
            "the FoundationDB API version is too old",
            selected=selected,
            fix=f"Use {OLDEST_API_VERSION} or later: remove the fdb.api_version() call, or upgrade `foundationdb`",
        )


def _select_newest(fdb: Any) -> int:
    known = getattr(fdb, "LATEST_API_VERSION", None)
    refused: RuntimeError | None = None
    for version in OLDER_API_VERSIONS if known is None else (min(API_VERSION, known),):
        try:
            fdb.api_version(version)
        except RuntimeError as error:  # the binding does not know this version, or the library lacks the binding's
            refused = error.with_traceback(None)  # its frames refer to this local
        else:
            return version
    # The binding is of a newer series than the library.
    newest = int(sys.modules["fdb.impl"]._capi.fdb_get_max_api_version())
    series = f"{newest // 100}.{newest // 10 % 10}"
    raise ClientUnusable(
        "the FoundationDB binding and the client library don't match",
        binding="before 7.3" if known is None else known,
        library=newest,
        fix=f"Install the binding of the library's series: `pip install 'foundationdb=={series}.*'`",
    ) from refused


def _library_file(module: ModuleType) -> str:
    """Where the linker found the library."""
    capi = sys.modules[f"{module.__name__}.impl"]._capi
    info = (ctypes.c_char_p * 4)()  # a Dl_info: the file, its base, a symbol, its address
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    if not dladdr(ctypes.cast(capi.fdb_get_error, ctypes.c_void_p), info) or not info[0]:
        return ""
    return os.path.realpath(os.fsdecode(info[0]))


# A copy of the library that neither this process nor an ancestor has loaded; needed only during loading


@contextlib.contextmanager
def _copy_in_memory() -> Iterator[str]:
    fd, _process.spare_fd = _process.spare_fd, -1
    if fd < 0:
        fd = _copy_to_memory()
    try:
        # The pid makes the name differ from the one an ancestor used.
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


@contextlib.contextmanager
def _copy_on_disk() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="celery-fdb-") as directory:
        yield shutil.copy(_known_library(), directory)


def _copy_to_memory() -> int:
    """Returns a file descriptor. Raises ``StoreUnavailable`` if the system has no files in memory."""
    library = _known_library()
    try:
        try:
            fd = os.memfd_create("libfdb_c", os.MFD_CLOEXEC | MFD_EXEC)
        except OSError:  # kernels before 6.3 have no such flag and need none
            fd = os.memfd_create("libfdb_c", os.MFD_CLOEXEC)
        with open(library, "rb") as source, open(fd, "wb", closefd=False) as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except (AttributeError, OSError) as error:
        raise StoreUnavailable("the FoundationDB client library can't be copied", reason=str(error)) from error
    return fd


def _known_library() -> str:
    if not _process.library:
        raise StoreUnavailable(
            "can't use FoundationDB after a fork: its library's file is unknown",
            fix="Open the broker after the fork, or start the process with `spawn`",
        )
    return _process.library


@contextlib.contextmanager
def _redirected(path: str) -> Iterator[None]:
    """Make the binding's import, which has no parameter for that, load the library from ``path``."""
    original = ctypes.CDLL

    def load(name: str | None, *args: Any, **kwargs: Any) -> ctypes.CDLL:
        asked = os.path.basename(name or "")
        return original(path if asked.startswith(("libfdb_c", "fdb_c")) else name, *args, **kwargs)

    ctypes.CDLL = load  # type: ignore[assignment,misc]  # for one import
    try:
        yield
    finally:
        ctypes.CDLL = original  # type: ignore[misc]  # a class


# Around a fork


def _before_fork() -> None:
    impl = sys.modules.get("fdb.impl")
    started = getattr(impl, "_network_thread", None) is not None
    if _process.module is not None and started and _process.spare_fd < 0 and not _is_dead():
        with contextlib.suppress(StoreUnavailable):  # a child that needs a copy tries again
            _process.spare_fd = _copy_to_memory()


def _after_fork_in_child() -> None:
    _process.lock = threading.RLock()  # another thread of the parent may have held it
    if _is_dead():
        _disarm()


def _disarm() -> None:
    """Prevent inherited objects from calling the dead library."""
    impl = sys.modules["fdb.impl"]
    atexit.unregister(impl._stop_on_exit)
    for name in ("TransactionRead", "Transaction", "Future", "Database", "Tenant"):
        owner = getattr(impl, name, None)
        if owner is not None:
            owner.__del__ = lambda _: None


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
