"""An exception at one chosen moment of a call, as a signal handler raises it; for tests that try every moment in turn.

The call runs in a thread of its own. A trace function may raise where no signal handler can, at ``POP_EXCEPT`` for
one: CPython then keeps the exception that was being handled on that thread's stack for good, and whatever is raised
there later has it as its context. So the thread is not used again.
"""

from __future__ import annotations

import dis
import gc
import linecache
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, Literal

from kit.faults import Interrupted

#: After this time the call is stuck.
DEADLINE_S = 60.0


def interrupt(
    call: Callable[[], object],
    moment: int,
    files: Collection[str],
    *,
    per: Literal["line", "opcode"] = "line",
    strikes: Callable[[FrameType], bool] = lambda _frame: True,
    error: type[BaseException] = Interrupted,
) -> str:
    """Raise the error at the so many-th line or bytecode (from 1) of these source files.

    Moments that do not pass ``strikes`` don't count. Returns where it was; ``""`` if the call ended before. Raises what
    the call raises of its own, and ``AssertionError`` if it does not end.
    """
    attempt = _Attempt(call, moment, files, per, strikes, error)
    thread = threading.Thread(target=attempt.run, name="interrupted", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), f"the call does not end after an exception at {attempt.where or 'no line'}"
    if attempt.failure is not None:
        raise attempt.failure
    return attempt.where


def runs_handlers(frame: FrameType) -> bool:
    """Whether Python may run a signal handler at this line.

    Not on the way out of a ``with``, at a ``try:`` (whose own instruction no handler covers), and between a statement
    without a call and the first line of the function called next.
    """
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return not source.startswith(("with ", "try:", "callback("))


def _gets_past(frame: FrameType) -> bool:
    """Whether this is a jump (or, in 3.12, the loop it led to), which no ``with`` or ``try`` around it need cover.

    What a trace function raises there gets past them, and in 3.13 so does what a signal handler raises on the way back
    to a loop: https://github.com/python/cpython/issues/130279. What it raises where 3.12 drops a generator, in an
    instruction without a line, is lost.
    """
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    is_jump = sys.version_info >= (3, 12) and operation.startswith(("JUMP", "POP_JUMP", "FOR_ITER"))
    return is_jump or frame.f_lineno is None


class _Attempt:
    """One call, in one thread."""

    def __init__(
        self,
        call: Callable[[], object],
        moment: int,
        files: Collection[str],
        per: str,
        strikes: Callable[[FrameType], bool],
        error: type[BaseException],
    ) -> None:
        self._call = call
        self._left = moment
        self._files = files
        self._per = per
        self._strikes = strikes
        self._error = error
        self.where = ""
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            # Python 3.12 has opcode events only if a frame has asked for them before: python/cpython#103615.
            sys._getframe().f_trace_opcodes = self._per == "opcode"
            gc.disable()  # or it would strike in the finalizers of what was left behind before, as Python collects it
            sys.settrace(self._enter)
            try:
                self._call()
            finally:
                sys.settrace(None)
                gc.enable()
        except self._error:
            pass
        except BaseException as error:
            self.failure = error

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace = self._trace  # before the next line, which has no effect without it in Python 3.13
        frame.f_trace_opcodes = self._per == "opcode"
        return self._trace

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == self._per and not _gets_past(frame) and self._strikes(frame):
            self._left -= 1
            if self._left == 0:
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno} +{frame.f_lasti}"
                raise self._error
        return self._trace
