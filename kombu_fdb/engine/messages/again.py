"""Publishing again what may be stored already: Celery's and kombu's default after a lost connection.

Model. A publish whose outcome is unknown (``store/tokens.py``) leaves its messages here, each with the doubt about
their transaction. When the same message is published again in this process, the doubt is settled first: what has
been stored counts as published, by the earlier call; what has not is fenced, so that it never will be, and is stored
now. So it is stored once, whichever thread repeats it, and nothing is written for that while all goes well.

The same message is one that says the same: exchange, routing key, payload (in which the task's id stands), key,
priority and times, but not the moments reckoned from them. Each doubtful message answers for one repetition: of two
equal messages that were published and are in doubt, each is settled by one call. In which batch it comes again does not
matter.

Bounds: a doubt is forgotten after :data:`~kombu_fdb.store.tokens.LONGEST_DOUBT_S`, and beyond :data:`MOST_MESSAGES`
messages the oldest are; publishing such a message again may store it twice, as it may in another process.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

from kombu_fdb.engine.messages.publish import Published
from kombu_fdb.model import Publication
from kombu_fdb.primitives.clock import Clock, IdSource
from kombu_fdb.store.tokens import Doubt

MOST_MESSAGES = 10_000


class Doubted(NamedTuple):
    """A message that may be stored: the ``number``-th of a transaction."""

    doubt: Doubt[Published]
    number: int

    @property
    def reached(self) -> list[str]:
        """The queues it is in, if its transaction has happened."""
        result = self.doubt.result
        return result.reached[self.number] if result is not None else []


@dataclass(slots=True)
class Burial:
    """A message from outside that is to be buried once, however often that is tried (``Publisher.bury_copy``).

    Made before the first try, and the same in each. Of a try whose outcome is unknown the next one finds out, or fences
    it. What can't be told any more is buried again, as another message: two letters are better than none, and they
    share no chunks.
    """

    publication: Publication
    doubt: Doubt[None] = field(default_factory=Doubt)

    def begin(self, clock: Clock, ids: IdSource) -> bool:
        """Another try. False: an earlier one has buried it."""
        is_lost = self.doubt.is_open and self.doubt.is_too_old(clock)
        if is_lost:
            self.doubt = Doubt()
        if is_lost or not self.publication.message_id:
            self.publication = self.publication._replace(message_id=ids())
        return self.doubt.landed is None


class Doubts:
    """Messages in doubt, by what they say. Thread-safe; true when there are any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._found: OrderedDict[bytes, deque[Doubted]] = OrderedDict()
        self._messages = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        return self._messages

    def note(self, publications: Sequence[Publication], doubt: Doubt[Published]) -> None:
        """These may be stored, or may still be."""
        for number, publication in enumerate(publications):
            self.keep(publication, Doubted(doubt, number))

    def keep(self, publication: Publication, doubted: Doubted) -> None:
        """What was taken, and is in doubt as before."""
        identity = _identity(publication)
        with self._lock:
            self._found.setdefault(identity, deque()).append(doubted)
            self._messages += 1
            while self._messages > MOST_MESSAGES:
                _, oldest = self._found.popitem(last=False)
                self._messages -= len(oldest)

    def take(self, publication: Publication) -> Doubted | None:
        """The message that may be this one; no other caller gets it."""
        identity = _identity(publication)
        with self._lock:
            same = self._found.get(identity)
            doubted = None
            while same and doubted is None:
                doubted = self._young(same.popleft())
                self._messages -= 1
            if not same:
                self._found.pop(identity, None)
        return doubted

    def _young(self, doubted: Doubted) -> Doubted | None:
        return None if doubted.doubt.is_too_old(self._clock) else doubted


def _identity(publication: Publication) -> bytes:
    """Moments are reckoned anew by each call; whether there is one says enough."""
    said = publication._replace(message_id=b"", due_ms=publication.due_ms > 0, expires_ms=0, payload=b"")
    return blake2b(repr(said).encode() + publication.payload, digest_size=16).digest()
