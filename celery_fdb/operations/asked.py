"""What an action on many messages was asked about: its question counts them, and its form tells which they were.

Model. The question on all that match looks through the messages and notes a fingerprint of each one that matches. When
it comes back confirmed, the action is done to those and to no others: what has come meanwhile is left alone, whatever
it is called. If some of them are gone, the action is refused before it begins, and the question is put anew; one on
waiting messages is not refused for that, as workers take them all the time.

Where there are too many to be named, the question says "at least", and the action is done to all that match and had
come by then. The question on a whole queue has its number from the counters, and the action is done to what had come by
then.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kombu_fdb import Broker
from kombu_fdb.api.arguments import State
from kombu_fdb.engine.stored.task_index import STAMP_BYTES
from kombu_fdb.errors import InvalidArgument, KombuFDBError
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

#: Of a form.
FIELD = "asked"
#: Messages that a question names, and among how many it looks for them; and of them in one transaction.
MOST_NAMED = 10_000
MOST_LOOKED_AT = 50_000
PART = 500
FINGERPRINT_BYTES = 8


class AskedAnew(KombuFDBError):
    """Other messages match now than those that the question was about. Nothing was changed."""

    text = "these are not the messages that you were asked about; nothing was changed"


class Asked(NamedTuple):
    """``named``: a fingerprint of each; None if they are too many, empty of a whole queue.

    ``by``: what comes after this mark stays (:meth:`~kombu_fdb.api.queue.Queue.mark`); the latest of all queues.
    """

    number: int
    named: frozenset[bytes] | None
    by: bytes = b""

    @classmethod
    def of(cls, broker: Broker, queue: str, key: str | None) -> Asked:
        """All that wait in the queue, or are ready with the key."""
        asked = broker.queue(queue)
        by = asked.mark()
        if key is None:
            counts = asked.stats()
            return cls(counts.ready + counts.delayed, frozenset(), by)
        found = asked.keys(prefix=key, limit=1).get(key)
        return cls(0 if found is None else found.ready, frozenset(), by)

    @classmethod
    def about(cls, messages: Iterable[Peeked], wanted: Callable[[Peeked], bool]) -> Asked:
        """Those of the messages that are wanted."""
        found: set[bytes] = set()
        for looked_at, each in enumerate(messages):
            if looked_at == MOST_LOOKED_AT or len(found) > MOST_NAMED:
                return cls(len(found), None)
            if each.message_id and wanted(each):  # an unreadable one has none
                found.add(_fingerprint(each))
        return cls(len(found), frozenset(found))

    @classmethod
    def parse(cls, text: str) -> Asked:
        """What ``str`` has made. Raises ``InvalidArgument``."""
        try:
            number, packed, by = text.split(".")
            raw, size = b"" if packed == "-" else urlsafe_b64decode(packed), FINGERPRINT_BYTES
            named = frozenset(raw[at : at + size] for at in range(0, len(raw), size))
            return cls(int(number), None if packed == "-" else named, bytes.fromhex(by))
        except ValueError:
            raise InvalidArgument("no question was asked", given=shown(text), fix="Begin it anew.") from None

    def __str__(self) -> str:
        named = "-" if self.named is None else urlsafe_b64encode(b"".join(sorted(self.named))).decode()
        return f"{self.number}.{named}.{self.by.hex()}"

    def tell(self, noun: str) -> str:
        """For a question: 2 dead letters."""
        return ("at least " if self.named is None else "") + plural(self.number, noun)

    def holds(self, message: Peeked) -> bool:
        """Whether the question was about this one."""
        return self.named is None or _fingerprint(message) in self.named

    def had_come(self, position: bytes) -> bool:
        """Whether a message at this position was there already: of those that were not named, all that is known."""
        return bool(self.named) or position[-STAMP_BYTES:][: len(self.by)] <= self.by

    def check(self, now: Asked) -> None:
        """Raises :class:`AskedAnew` if some of them are gone."""
        gone = len((self.named or frozenset()) - (now.named or self.named or frozenset()))
        if gone:
            raise AskedAnew(asked=self.number, gone=gone, still_there=self.number - gone)


def messages_of(broker: Broker, queues: Iterable[str], state: State) -> Iterator[Peeked]:
    """Those of each queue, one after the other."""
    for queue in queues:
        after: bytes | None = b""
        while after is not None:
            page = broker.queue(queue).page(PART, state=state, after=after)
            yield from (each.message for each in page.messages)
            after = page.following


def _fingerprint(message: Peeked) -> bytes:
    """Of a message where it is; one that dies again is another one."""
    died_ms = message.deaths[0].time_ms if message.deaths else 0
    what = repr((message.queue, message.message_id, died_ms)).encode(errors="surrogatepass")
    return hashlib.sha256(what).digest()[:FINGERPRINT_BYTES]
