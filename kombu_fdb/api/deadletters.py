"""The dead letters of one queue, for people and programs that look after them: count, list, replay, discard.

::

    with Broker.open(url) as broker:
        letters = broker.queue("jobs").dead_letters  # or broker.dead_letters("graveyard")
        letters.count("reason")
        letters.replay(error="ConnectionError", rate=50)

All verbs take the same conditions, and all of those given must hold:

* ``reason``, ``queue``, ``error`` (an exception's class): of the last death;
* ``older_than``, ``younger_than``: seconds since the last death;
* ``key`` ("" for none), ``task`` (a Celery task's name), ``message_id``;
* ``where``: any function of a :class:`~kombu_fdb.model.Peeked`, called with the letters for which the others hold. It
  may be called again for the same letter, and an exception it raises ends the call between two parts.

Every verb walks the queue once, in transactions of bounded size, up to the letter that was the last one when it began
(``engine/dead_letters/scan.py``). It may be interrupted at any time, by ``stop``, an exception or a kill, and called
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from kombu_fdb.engine.dead_letters.replay import Moved
from kombu_fdb.engine.dead_letters.scan import LETTERS_PER_TRANSACTION, Walk, Wanted, task_of
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.errors import OptionError, QueueNotFound
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.clock import Clock, SystemClock

__all__ = ["DeadLetters", "Pace"]

#: A paced replay moves what is due in so many seconds at a time, and looks at ``stop`` so often.
PART_S = 0.5

Stop = Callable[[], bool]


class Holder(Protocol):
    """What this needs of a broker."""

    @property
    def engine(self) -> Engine: ...


class Pace:
    """At most ``rate`` messages a second on the caller's clock; None for as fast as it goes. Raises ``OptionError``."""

    def __init__(self, clock: Clock, rate: float | None) -> None:
        if rate is not None and not rate > 0:
            raise OptionError("a rate is more than 0 messages a second", rate=rate)
        self._clock = clock
        self._rate = rate
        self._begin = clock.monotonic()

    @property
    def part(self) -> int:
        """How many may go at once."""
        if self._rate is None:
            return LETTERS_PER_TRANSACTION
        return max(1, min(LETTERS_PER_TRANSACTION, int(self._rate * PART_S)))

    def wait(self, moved: int, stop: Stop) -> None:
        """Until the next one may follow the first ``moved``, or until told to stop."""
        if self._rate is None:
            return
        due = self._begin + moved / self._rate
        while (left := due - self._clock.monotonic()) > 0 and not stop():
            self._clock.sleep(min(left, PART_S))


def never() -> bool:
    """Nobody stops it."""
    return False


class DeadLetters:
    """Get it from :attr:`.broker.Queue.dead_letters` or :meth:`.broker.Broker.dead_letters`."""

    def __init__(self, holder: Holder, dead_queue: str, *, clock: Clock | None = None) -> None:
        """``clock``: what ages and paces are measured by."""
        self.dead_queue = dead_queue
        self._holder = holder
        self._clock = clock or SystemClock()

    def __repr__(self) -> str:
        return f"<DeadLetters in {self.dead_queue}>"

    # -- looking ---------------------------------------------------------------------------------------------------

    def count(self, by: str | Callable[[Peeked], str] | None = None, **conditions: Any) -> Counter[str]:
        """How many there are, by ``"reason"``, ``"task"``, ``"key"``, ``"queue"``, ``"error"`` or any function.

        Without ``by`` one number, under the queue's name. Without both it is read from the counter, else the letters
        are. Raises ``OptionError``.
        """
        if by is None and not conditions:
            return Counter({self.dead_queue: self._holder.engine.inspect.counts(self.dead_queue).ready})
        name_of = (lambda _: self.dead_queue) if by is None else _classifier(by)
        return Counter(name_of(letter) for letter in self.each(**conditions))

    def list(self, limit: int = 100, **conditions: Any) -> list[Peeked]:
        """The oldest of them, with payload and deaths (in a queue with priorities: the oldest of the most urgent)."""
        return [letter for letter, _ in zip(self.each(**conditions), range(limit), strict=False)]

    def get(self, message_id: bytes) -> Peeked | None:
        """One by its id; None if it is not here. Reads the queue."""
        return next(self.each(message_id=message_id), None)

    def each(self, **conditions: Any) -> Iterator[Peeked]:
        """All of them, one after the other; what moves meanwhile may be missed."""
        walk, cursor = self._walk(conditions), b""
        while True:
            letters, cursor = self._holder.engine.dead_letters.look(walk, cursor, LETTERS_PER_TRANSACTION)
            yield from letters
            if not cursor:
                return

    # -- moving ----------------------------------------------------------------------------------------------------

    def replay(
        self,
        limit: int | None = None,
        *,
        to: str | None = None,
        rate: float | None = None,
        progress: Callable[[int], object] | None = None,
        stop: Stop = never,
        **conditions: Any,
    ) -> int:
        """Bring them back to the queues they died in, or all of them to the queue ``to``. Returns how many.

        ``rate``: messages per second. ``progress`` is called with their number after each transaction. ``stop`` is
        asked before each, and twice a second in a pause. A letter that dies again meanwhile is left for the next call.
        See :mod:`kombu_fdb.engine.dead_letters.replay` for what a message keeps.

        Raises ``QueueNotFound`` if a queue was deleted; the rest stays dead, ``replayed`` says how many are back.
        """
        walk, engine, pace = self._walk(conditions), self._holder.engine, Pace(self._clock, rate)

        def part(cursor: bytes, room: int) -> Moved:
            return engine.dead_letters.replay_part(walk, cursor, min(room, pace.part), to=to)

        return _move(part, limit, pace, progress, stop)

    def discard(
        self,
        limit: int | None = None,
        *,
        progress: Callable[[int], object] | None = None,
        stop: Stop = never,
        **conditions: Any,
    ) -> int:
        """Delete them; without conditions all there are now. Returns how many. Arguments as of :meth:`replay`."""
        walk, engine = self._walk(conditions), self._holder.engine
        return _move(partial(engine.dead_letters.discard_part, walk), limit, Pace(self._clock, None), progress, stop)

    # -- conditions ------------------------------------------------------------------------------------------------

    def _walk(self, conditions: dict[str, Any]) -> Walk:
        moments: dict[str, Any] = {}
        for name, condition in (("older_than", "died_before_ms"), ("younger_than", "died_after_ms")):
            seconds = conditions.pop(name, None)
            if seconds is not None:
                moments[condition] = self._clock.wall_ms() - int(seconds * 1000)
        try:
            wanted = Wanted(**conditions, **moments)
        except TypeError:
            known = "error, key, message_id, older_than, queue, reason, task, where, younger_than"
            raise OptionError("unknown condition", given=tuple(conditions), fix=f"There are {known}.") from None
        return self._holder.engine.dead_letters.walk(self.dead_queue, wanted)


def _move(
    part: Callable[[bytes, int], Moved],
    limit: int | None,
    pace: Pace,
    progress: Callable[[int], object] | None,
    stop: Stop,
) -> int:
    """Part after part, up to ``limit`` letters. Returns how many."""
    cursor, total = b"", 0
    while (limit is None or total < limit) and not stop():
        room = LETTERS_PER_TRANSACTION if limit is None else min(limit - total, LETTERS_PER_TRANSACTION)
        try:
            moved, cursor = part(cursor, room)
        except QueueNotFound as error:
            raise QueueNotFound(error.text, **error.attributes, replayed=total) from None
        total += moved
        if progress is not None:
            progress(total)
        if not cursor:
            break
        pace.wait(total, stop)
    return total


def _classifier(by: str | Callable[[Peeked], str]) -> Callable[[Peeked], str]:
    if callable(by):
        return by
    names: dict[str, Callable[[Peeked], str]] = {
        "reason": lambda letter: letter.deaths[0].reason if letter.deaths else "",
        "queue": lambda letter: letter.deaths[0].queue if letter.deaths else "",
        "error": lambda letter: str(letter.deaths[0].details.get("error_class", "")) if letter.deaths else "",
        "task": task_of,
        "key": lambda letter: letter.key,
    }
    if by not in names:
        raise OptionError("can't count by that", by=by, fix=f"There are {', '.join(sorted(names))}, or a function.")
    return names[by]
