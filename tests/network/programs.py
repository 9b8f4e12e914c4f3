"""What several programs of a run have in common: threads that work until SIGTERM, and end together."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable

from kit.history.record import Recorder

#: How often the main thread looks whether a signal has come, in seconds.
LOOK_S = 1.0


def work(recorder: Recorder, jobs: Iterable[Callable[[threading.Event], None]]) -> None:
    """Run each in a thread of its own, with the event that tells it to end. An error of one ends the process."""
    over, failed = threading.Event(), threading.Event()

    def guarded(job: Callable[[threading.Event], None]) -> None:
        try:
            job(over)
        except SystemExit:
            over.wait()
        except BaseException:
            traceback.print_exc()
            failed.set()
            over.set()

    signal.signal(signal.SIGTERM, lambda *_: over.set())
    threads = [threading.Thread(target=guarded, args=[job]) for job in jobs]
    threads.append(threading.Thread(target=recorder.pulse, args=[over]))
    for each in threads:
        each.start()
    print("begun", flush=True)
    # If the signal comes while the process is stopped, any thread may get it, and only this one runs the handler.
    while not over.wait(LOOK_S):
        pass
    for each in threads:
        each.join()
    if failed.is_set():
        sys.exit(1)
