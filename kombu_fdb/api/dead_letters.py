"""The dead letters of one queue, for people and programs that look after them: count, list, replay, discard.

::

    with Broker.open(url) as broker:
        letters = broker.queue("jobs").dead_letters  # or broker.dead_letters("graveyard")
        letters.count("reason")
        letters.replay(error="ConnectionError", rate=50)

All verbs take the same conditions (:class:`~kombu_fdb.api.arguments.Conditions`), and all of those given must hold:

* ``reason``, ``queue``, ``error`` (an exception's class): of the last death;
* ``older_than``, ``younger_than``: seconds since the last death;
* ``key`` ("" for none), ``task`` (a Celery task's name), ``message_id``;
* ``where``: any function of a :class:`~kombu_fdb.model.Peeked`, called with the letters for which the others hold. It
  may be called again for the same letter, and an exception it raises ends the call between two parts.

Every verb walks the queue once, in transactions of bounded size, up to the letter that was the last one when it began
(``engine/dead_letters.py``). It may be interrupted at any time, by ``stop``, an exception or a kill, and called
again. To take single letters as jobs, ask for the queue they are in: ``broker.queue(letters.dead_queue).take()``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Unpack

from kombu_fdb.api.arguments import Conditions, Stop, check_limit, check_name, never, seconds
from kombu_fdb.api.connection import Connection
from kombu_fdb.engine.dead_letters import LETTERS_PER_TRANSACTION, LetterWalk, task_of
from kombu_fdb.engine.scheduling.limit_changes import LIMIT_KINDS
from kombu_fdb.errors import InvalidArgument, QueueError, QueueNotFound
from kombu_fdb.model import Part, Peeked, Spot
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.ranges import TEXT

NO_ID = (b"", None)
#: A paced replay moves at once what is due in this many seconds, and asks ``stop`` as often.
PART_S = 0.5


class DeadLetters:
    """Get it from :attr:`.queue.Queue.dead_letters` or :meth:`.broker.Broker.dead_letters`."""

    def __init__(self, connection: Connection, dead_queue: str, *, clock: Clock | None = None) -> None:
        """``clock``: measures ages and paces."""
        self.dead_queue = dead_queue
        self._connection = connection
        self._clock = clock or Clock()

    def __repr__(self) -> str:
        return f"<DeadLetters in {self.dead_queue}>"

    # -- looking ---------------------------------------------------------------------------------------------------

    def count(self, by: str | Callable[[Peeked], str] | None = None, **conditions: Unpack[Conditions]) -> Counter[str]:
        """How many there are, by ``"reason"``, ``"task"``, ``"key"``, ``"queue"``, ``"error"`` or any function.

        Without ``by``, one number under the queue's name. Without ``by`` and conditions it comes from the counter,
        otherwise from the letters. Raises ``InvalidArgument``.
        """
        if by is None and not conditions:
            return Counter({self.dead_queue: self._connection.engine.inspect.counts(self.dead_queue).ready})
        name_of = (lambda _: self.dead_queue) if by is None else _classifier(by)
        return Counter(name_of(letter) for letter in self.each(**conditions))

    def list(self, limit: int = 100, **conditions: Unpack[Conditions]) -> list[Peeked]:
        """The oldest of them, with payload and deaths (in a queue with priorities: the oldest of the most urgent)."""
        check_limit(limit)
        return [letter for letter, _ in zip(self.each(**conditions), range(limit), strict=False)]

    def get(self, message_id: bytes) -> Peeked | None:
        """One by its id; None if it is not here. Reads the queue."""
        return next(self.each(message_id=message_id), None)

    def each(self, **conditions: Unpack[Conditions]) -> Iterator[Peeked]:
        """All of them, one after the other; a letter that moves meanwhile may be missed."""
        walk, cursor = self._walk(conditions), b""
        while True:
            letters, cursor = self._connection.engine.dead_letters.look(walk, cursor, LETTERS_PER_TRANSACTION)
            yield from letters
            if not cursor:
                return

    # -- moving ----------------------------------------------------------------------------------------------------

    def replay(
        self,
        limit: int | None = None,
        *,
        at: Iterable[Spot] | None = None,
        to: str | None = None,
        rate: float | None = None,
        progress: Callable[[int], object] | None = None,
        stop: Stop = never,
        **conditions: Unpack[Conditions],
    ) -> int:
        """Replay them to the queues they died in, or all of them to the queue ``to``. Returns how many.

        ``at``: only those at the spots where a page has shown them (:attr:`~kombu_fdb.model.Listed.spot`), each in a
        transaction; a letter that has moved meanwhile is left alone. It can't be combined with other arguments.
        ``rate``: messages per second. ``progress`` is called with their number after each transaction. ``stop`` is
        asked before each, and twice a second in a pause. A letter that dies again meanwhile is left for the next call.
        See :mod:`kombu_fdb.engine.dead_letters` for what a message keeps.

        Raises ``QueueNotFound`` if a queue was deleted; the rest stays dead, ``replayed`` says how many are back.
        """
        if at is not None:
            _check_alone(limit, to, rate, conditions)
            return self._replay_at(at)
        check_limit(limit)
        if to is not None:
            check_name("queue's name", to)
        walk, engine = self._walk(conditions), self._connection.engine
        LIMIT_KINDS["rate"].check("rate", rate)
        part = partial(engine.dead_letters.replay_part, walk, to=to)
        return self._move(part, limit, progress, stop, rate=rate)

    def _replay_at(self, spots: Iterable[Spot]) -> int:
        total, replay_at = 0, self._connection.engine.dead_letters.replay_at
        for each in spots:
            try:
                total += replay_at(self.dead_queue, each.position, each.message_id) is not None
            except QueueError as error:
                raise type(error)(error.text, **error.attributes, replayed=total) from None
        return total

    def discard(
        self,
        limit: int | None = None,
        *,
        progress: Callable[[int], object] | None = None,
        stop: Stop = never,
        **conditions: Unpack[Conditions],
    ) -> int:
        """Delete them; without conditions all there are now. Returns how many. Arguments as of :meth:`replay`."""
        check_limit(limit)
        walk, engine = self._walk(conditions), self._connection.engine
        return self._move(partial(engine.dead_letters.discard_part, walk), limit, progress, stop)

    def _move(
        self,
        part: Callable[[bytes, int], tuple[int, bytes]],
        limit: int | None,
        progress: Callable[[int], object] | None,
        stop: Stop,
        *,
        rate: float | None = None,
    ) -> int:
        """Part after part, up to ``limit`` letters, and at most ``rate`` a second on the caller's clock.

        Returns how many.
        """
        most = LETTERS_PER_TRANSACTION
        if rate is not None:
            most = max(1, min(most, int(rate * PART_S)))
        begin_s, cursor, total = self._clock.monotonic(), b"", 0
        while (limit is None or total < limit) and not stop():
            try:
                moved, cursor = part(cursor, most if limit is None else min(limit - total, most))
            except QueueNotFound as error:
                raise QueueNotFound(error.text, **error.attributes, replayed=total) from None
            total += moved
            if progress is not None:
                progress(total)
            if not cursor:
                break
            if rate is not None:
                self._wait(begin_s + total / rate, stop)
        return total

    def _wait(self, until_s: float, stop: Stop) -> None:
        """Until the next letter may follow, or until told to stop."""
        while (left_s := until_s - self._clock.monotonic()) > 0 and not stop():
            self._clock.sleep(min(left_s, PART_S))

    # -- in parts --------------------------------------------------------------------------------------------------

    def replay_changed(self, spot: Spot, payload: bytes) -> bool:
        """Replay one with another payload, at the spot where a page has shown it; False if it has moved.

        Raises ``QueueError`` for a message that is no dead letter, ``QueueNotFound``, ``MessageTooLarge``; the letter
        is dead then, as it was.
        """
        position, message_id = spot.position, spot.message_id
        engine = self._connection.engine.dead_letters
        return engine.replay_at(self.dead_queue, position, message_id, payload=payload) is not None

    def replay_part(self, mark: bytes = b"", *, to: str | None = None, **conditions: Unpack[Conditions]) -> Part:
        """Replay some of those that meet the conditions, in one transaction that looks through 200.

        For callers that show progress, or don't wait for the end. ``mark``: :attr:`~kombu_fdb.model.Part.following` of
        the part before; what dies after the first part is left. Raises ``QueueNotFound``; nothing of the part is back
        then.
        """
        if to is not None:
            check_name("queue's name", to)
        return self._part(mark, conditions, partial(self._connection.engine.dead_letters.replay_part, to=to))

    def discard_part(self, mark: bytes = b"", **conditions: Unpack[Conditions]) -> Part:
        """The same, deleting them."""
        return self._part(mark, conditions, self._connection.engine.dead_letters.discard_part)

    def _part(
        self, mark: bytes, conditions: Conditions, verb: Callable[[LetterWalk, bytes, int], tuple[int, bytes]]
    ) -> Part:
        def part() -> Part:
            walk, cursor = self._walk(conditions).after(mark)
            moved, cursor = verb(walk, cursor, LETTERS_PER_TRANSACTION)
            return Part(moved, walk.mark(cursor))

        return self._connection.engine.transactions.as_one(part)

    # -- conditions ------------------------------------------------------------------------------------------------

    def _walk(self, given: Conditions) -> LetterWalk:
        conditions: dict[str, Any] = {**given}
        if conditions.get("message_id", True) in NO_ID:  # which is none, so that all letters would meet it
            raise InvalidArgument("no message's id", message_id=conditions["message_id"])
        for name in ("reason", "queue", "key", "task", "error"):
            TEXT.or_none().check(name, conditions.get(name))
        moments: dict[str, Any] = {}
        for name, condition in (("older_than", "died_before_ms"), ("younger_than", "died_after_ms")):
            age_s = conditions.pop(name, None)
            if age_s is not None:
                moments[condition] = self._clock.wall_ms() - int(seconds(name, age_s) * 1000)
        try:
            return self._connection.engine.dead_letters.walk(self.dead_queue, **conditions, **moments)
        except TypeError:
            known = "error, key, message_id, older_than, queue, reason, task, where, younger_than"
            raise InvalidArgument(
                "unknown condition", given=tuple(conditions), fix=f"Known conditions: {known}."
            ) from None


def _check_alone(limit: int | None, to: str | None, rate: float | None, conditions: Conditions) -> None:
    if limit is not None or to is not None or rate is not None or conditions:
        raise InvalidArgument(
            "spots go with nothing else", given=[*conditions], fix="Leave out limit, to, rate and the conditions."
        )


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
        raise InvalidArgument("can't count by that", by=by, fix=f"There are {', '.join(sorted(names))}, or a function.")
    return names[by]
