"""What the processes of a storm did, and what came of each message.

Model. Every process tells each of its steps, when it is done, by one line in a named pipe: ``KIND NAME WHO SECONDS``. A
line is shorter than ``PIPE_BUF``, so one that is killed in the middle of a step has told all of a line or nothing, and
lines never mix. A message is *confirmed* when the call that published it has returned, *begun* and *ended* by its task.

Of the confirmed messages, when the storm is over and the store is empty or nothing has moved for long enough:

* *lost*: it never ended, and is not in the store. Nothing excuses that (DURABLE, ONE-PLACE).
* *unfinished*: it never ended, and is still in the store (BACK-SOON).
* *doubled*: it was begun more than once by workers that were not struck (NOT-TWICE), or it is in the store twice.
* *again*: it was begun more than once, and all workers but one were killed or frozen: guarantees.md allows that.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

LINE_BYTES = 512  # the least PIPE_BUF that POSIX allows


class Step(NamedTuple):
    """One line: ``kind`` of ``name`` by ``who``, which took ``seconds``."""

    kind: str
    name: str
    who: str
    seconds: float


def teller(path: str, who: str) -> Callable[..., None]:
    """What a process tells its steps by. Opened once: a forked child may go on using it."""
    pipe = os.open(path, os.O_WRONLY)

    def tell(kind: str, name: str, seconds: float = 0.0) -> None:
        line = f"{kind} {name} {who} {seconds:.6f}\n".encode()
        assert len(line) <= LINE_BYTES
        os.write(pipe, line)

    return tell


class Verdict(NamedTuple):
    """What is printed of one storm; ``complaints``: whatever else must not happen, in words."""

    storm: str
    store: str
    seed: int
    confirmed: int
    lost: int
    doubled: int
    again: int
    unfinished: int
    slowest_s: float
    took_s: float
    complaints: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.unfinished or self.complaints)


class Ledger:
    """Reads the pipe in a thread of its own, so that no process ever waits for the storm to look."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "ledger")
        os.mkfifo(self.path, 0o600)
        self._pipe = os.open(self.path, os.O_RDWR)  # as a writer too, so that it has no end
        self._news = threading.Condition()
        self.counts = Counter[str]()
        self.confirmed: dict[str, Step] = {}
        self.begun: defaultdict[str, list[str]] = defaultdict(list)
        self.ended = Counter[str]()
        self.struck: set[str] = set()
        #: Between two steps of a kind, at most, since the caller last cleared it.
        self.longest_s = defaultdict[str, float](float)
        self._told_s: dict[str, float] = {}
        self._thread = threading.Thread(target=self._read, name="ledger", daemon=True)
        self._thread.start()
        self.tell = teller(self.path, "storm")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.tell("over", "-")
        self._thread.join()
        os.close(self._pipe)

    def wait(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Wait for steps until ``condition``, which may look at all of this; False if it does not come in time."""
        with self._news:
            return bool(self._news.wait_for(condition, timeout_s))

    def wait_while_moving(self, condition: Callable[[], object], patience_s: float) -> bool:
        """The same, for as long as there is a step at least every ``patience_s`` seconds."""
        while True:
            before = self.counts.total()
            if self.wait(condition, patience_s):
                return True
            if self.counts.total() == before:
                return False

    def is_done(self) -> bool:
        """Whether each confirmed message has ended."""
        return len(self.ended.keys() & self.confirmed.keys()) == len(self.confirmed)

    def _read(self) -> None:
        rest = b""
        while True:
            *lines, rest = (rest + os.read(self._pipe, 65536)).split(b"\n")
            with self._news:
                for line in lines:
                    kind, name, who, seconds = line.decode().split(" ")
                    if kind == "over":
                        return
                    self.note(Step(kind, name, who, float(seconds)))
                self._news.notify_all()

    def note(self, step: Step) -> None:
        self.counts[step.kind] += 1
        now = time.monotonic()
        self.longest_s[step.kind] = max(self.longest_s[step.kind], now - self._told_s.get(step.kind, now))
        self._told_s[step.kind] = now
        if step.kind == "confirmed":
            self.confirmed[step.name] = step
        elif step.kind == "begun":
            self.begun[step.name].append(step.who)
        elif step.kind == "ended":
            self.ended[step.name] += 1
        elif step.kind == "struck":
            self.struck.add(step.name)

    def explain(self) -> list[str]:
        """By whom each doubled message was begun, some of them."""
        return [f"{name} was begun by {', '.join(self.begun[name])}" for name in self.doubled()[:10]]

    # -- the books -----------------------------------------------------------------------------------------------------

    def doubled(self) -> list[str]:
        """Messages begun twice without an excuse, confirmed or not."""
        return [name for name, by in self.begun.items() if len([who for who in by if who not in self.struck]) > 1]

    def again(self) -> list[str]:
        return [name for name in self.begun.keys() - set(self.doubled()) if len(self.begun[name]) > 1]

    def missing(self) -> list[str]:
        return [name for name in self.confirmed if not self.ended[name]]

    def slowest_s(self) -> float:
        """The slowest call of a publisher that was not itself frozen meanwhile."""
        return max((step.seconds for step in self.confirmed.values() if step.who not in self.struck), default=0.0)

    def close_books(
        self,
        storm: str,
        store: str,
        seed: int,
        started: float,
        found: Collection[str],
        complaints: Collection[str] = (),
    ) -> Verdict:
        """``found``: the names of the messages that are in the store, as often as they are; ``started``: monotonic."""
        missing = self.missing()
        stored_twice = [name for name, times in Counter(found).items() if times > 1]
        return Verdict(
            storm=storm,
            store=store,
            seed=seed,
            confirmed=len(self.confirmed),
            lost=len(set(missing) - set(found)),
            doubled=len({*self.doubled(), *stored_twice}),
            again=len(self.again()),
            unfinished=len(set(missing) & set(found)),
            slowest_s=self.slowest_s(),
            took_s=time.monotonic() - started,
            complaints=(*complaints, *self.explain()),
        )
