"""What a deed on all that match was asked about: its question counts those messages, and its form names each of them.

Model. The question looks through the messages and notes a fingerprint of each one that matches. When it comes back
confirmed, the deed is done to those and to no others: what has come meanwhile is left alone, whatever it is called. If
some of them are gone, the deed is refused before it begins, and the question is put anew; a deed on waiting messages is
not refused for that, as workers take them all the time.

Where there are too many to be named, the question says "at least", and the deed is done to all that match.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kombu_fdb import Broker
from kombu_fdb.api.arguments import State
from kombu_fdb.errors import InvalidArgument, KombuFDBError
from kombu_fdb.model import Peeked
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

__all__ = ["FIELD", "MOST_LOOKED_AT", "MOST_NAMED", "Asked", "AskedAnew", "messages_of"]

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
    """``named``: a fingerprint of each; None if they are too many."""

    number: int
    named: frozenset[bytes] | None

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
        number, _, packed = text.partition(".")
        try:
            if packed == "-":
                return cls(int(number), None)
            raw, size = urlsafe_b64decode(packed), FINGERPRINT_BYTES
            return cls(int(number), frozenset(raw[at : at + size] for at in range(0, len(raw), size)))
        except ValueError:
            raise InvalidArgument("no question was asked", given=shown(text), fix="Begin it anew.") from None

    def __str__(self) -> str:
        named = "-" if self.named is None else urlsafe_b64encode(b"".join(sorted(self.named))).decode()
        return f"{self.number}.{named}"

    def tell(self, noun: str) -> str:
        """For a question: 2 dead letters."""
        return ("at least " if self.named is None else "") + plural(self.number, noun)

    def holds(self, message: Peeked) -> bool:
        """Whether the question was about this one."""
        return self.named is None or _fingerprint(message) in self.named

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
