"""An action: what a person may do, the question before it, how it runs, and its audit.

The question. A person asks for an action, sees a question, and confirms it; then the action runs. The question of an
action on many messages says how many there are, and its form carries which. To ask about all messages that match a
filter, the action looks through the queue and notes a fingerprint of each match. Once confirmed, it changes these
messages and no others: messages that arrived meanwhile are left alone, whatever task they name. If some of them are
gone, the action is refused before it begins, and the question is asked anew. An action on waiting messages is not
refused for that, because workers take such messages all the time.

If there are too many matches to note each, the question says "at least", and the action changes all matches that had
arrived by then. A question about a whole queue takes its number from the counters, and the action changes the messages
that had arrived by then.

The action. It changes messages where they were seen. A message that has moved meanwhile, because a worker took it or
another user was faster, is left alone and counted as missed.

An action on very many messages runs in parts: it ends after :data:`MOST_PARTS` transactions, or when its time is over,
whichever is first, but not before one part is done. Its outcome then has a mark, a text for a form: how many messages
are done, and where the next part begins. The same request with this mark goes on. An action on selected messages says
how many of them it did not reach in time. A failure of a later part does not undo earlier parts.

The audit has an entry for each action of a page, begun before it and completed after it, however it ends. So no page
does anything without an entry. One that was begun and never completed means that the process died in between. The
caller decides where entries are stored: the Django admin writes its own log, other pages may write a program's. A
command is run by a user of the machine, and has none.
"""

from __future__ import annotations

import hashlib
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, tzinfo
from typing import NamedTuple

from celery import Celery

from celery_fdb.inspection import filters
from celery_fdb.inspection.overview import look
from kombu_fdb import Broker
from kombu_fdb.api.queue import Queue
from kombu_fdb.errors import InvalidArgument, KombuFDBError
from kombu_fdb.keyspace.layout import STAMP_BYTES
from kombu_fdb.model import Listed, Part, Peeked, Spot, State
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.masking import plain
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

# -- the question ------------------------------------------------------------------------------------------------------


#: The form field that carries an :class:`Asked`, or the doubt that a question showed.
ASKED_FIELD = "asked"
#: How many messages a question names, how many it looks at for that, and how many it reads in one transaction.
MOST_NAMED = 10_000
MOST_LOOKED_AT = 50_000
PART = 500
FINGERPRINT_BYTES = 8


class AskedAnew(KombuFDBError):
    """Some messages that the question was about are gone, or there is more to ask. Nothing was changed."""

    text = "these are not the messages that you were asked about; nothing was changed"


class Asked(NamedTuple):
    """The messages that a question was about: their ``number``, and how to recognise them.

    ``named``: a fingerprint of each; None if they are too many, empty for a whole queue. ``by``: messages that arrived
    after this mark are left alone (:meth:`~kombu_fdb.api.queue.Queue.mark`); the latest mark of all queues.
    """

    number: int
    named: frozenset[bytes] | None
    by: bytes = b""

    @classmethod
    def of(cls, broker: Broker, queue: str, key: str | None) -> Asked:
        """A question about all that wait in the queue, or are ready with the key."""
        asked = broker.queue(queue)
        by = asked.mark()
        if key is None:
            counts = asked.stats()
            return cls(counts.ready + counts.delayed, frozenset(), by)
        if not key:  # those without one are all that no key has
            number = asked.count() - sum(each.ready for each in asked.keys().values())
            return cls(max(number, 0), frozenset(), by)
        found = asked.keys(prefix=key, limit=1).get(key)
        return cls(0 if found is None else found.ready, frozenset(), by)

    @classmethod
    def about(cls, messages: Iterable[Peeked], wanted: Callable[[Peeked], bool]) -> Asked:
        """A question about the messages that ``wanted`` accepts."""
        found: set[bytes] = set()
        for looked_at, each in enumerate(messages):
            if looked_at == MOST_LOOKED_AT or len(found) > MOST_NAMED:
                return cls(len(found), None)
            if each.message_id and wanted(each):  # an unreadable message has no id
                found.add(_fingerprint(each))
        return cls(len(found), frozenset(found))

    @classmethod
    def parse(cls, text: str) -> Asked:
        """Read the text that ``str`` made. Raises ``InvalidArgument``."""
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
        """The number for a question, such as "2 dead letters"."""
        return ("at least " if self.named is None else "") + plural(self.number, noun)

    @property
    def is_about_none(self) -> bool:
        """Whether there was nothing to ask about. False if a match may be among those that were not looked at."""
        return self.number == 0 and self.named == frozenset()

    def holds(self, message: Peeked) -> bool:
        """Whether the question was about this message."""
        return self.named is None or _fingerprint(message) in self.named

    def had_come(self, position: bytes) -> bool:
        """Whether a message at this position was there when the question was asked. True if messages are named."""
        return bool(self.named) or position[-STAMP_BYTES:][: len(self.by)] <= self.by

    def includes_all_of(self, queue: Queue) -> bool:
        """Whether every message that waits in the queue was there when the question was asked. Reads all of them."""
        return all(self.had_come(each.position) for state in WAITING for each in listed(queue, state))

    def check(self, now: Asked) -> None:
        """Compare with what a question is about now. Raises :class:`AskedAnew` if some messages are gone."""
        gone = len((self.named or frozenset()) - (now.named or self.named or frozenset()))
        if gone:
            raise AskedAnew(asked=self.number, gone=gone, still_there=self.number - gone)


def listed(queue: Queue, state: State) -> Iterator[Listed]:
    """The queue's messages in a state, with the beginnings of their payloads, in several transactions."""
    after: bytes | None = b""
    while after is not None:
        page = queue.page(PART, state=state, after=after)
        yield from page.messages
        after = page.following


def _fingerprint(message: Peeked) -> bytes:
    """The fingerprint of a message in its queue. A message that dies again gets another."""
    died_ms = message.deaths[0].time_ms if message.deaths else 0
    what = repr((message.queue, message.message_id, died_ms)).encode(errors="surrogatepass")
    return hashlib.sha256(what).digest()[:FINGERPRINT_BYTES]


# -- the action --------------------------------------------------------------------------------------------------------


#: Shown instead of a queue's name by an action on all queues of dead letters.
EVERYWHERE = "all queues"
#: States of messages that an action on all acts upon.
WAITING: tuple[State, ...] = ("ready", "delayed")


class Request(NamedTuple):
    """What a person asks an action to do, and to which messages."""

    queue: str
    spots: Sequence[Spot] = ()
    #: The key to act on; None for the whole queue.
    key: str | None = None
    #: What people call the messages, by message id.
    names: Mapping[bytes, str] = {}
    #: The project's app, for the results of its tasks; ``fix_app`` tells the user how to name one.
    app: Celery | None = None
    fix_app: str = ""
    #: The form's values, by the names of the action's fields and of the filter's (``inspection/filters.py``).
    fields: Mapping[str, str] = {}
    #: The mark at which the previous part ended; "" for the first part.
    mark: str = ""
    #: The time zone of moments that name none.
    zone: tzinfo = UTC
    #: After so many seconds the action ends and says how far it is, before a browser gives up.
    seconds: float = 4.0
    clock: Clock = Clock()

    def __str__(self) -> str:
        if self.key is not None:
            return f"key {self.key!r} of {self.queue}"
        return self.queue

    @property
    def untold(self) -> str:
        """A sentence about results that can't be updated without an app; "" with one."""
        if self.app is not None:
            return ""
        return f"Results and chords are not updated, because no Celery app is known here. {self.fix_app}".rstrip()

    @property
    def state(self) -> State:
        """The state of the messages of an action on all: ready, or delayed if the fields say so.

        Raises ``InvalidArgument``.
        """
        asked = self.fields.get("state") or "ready"
        for each in WAITING:
            if asked == each:
                return each
        raise InvalidArgument("all ready or all delayed messages", given=shown(asked), fix="Select the others.")

    @property
    def filter(self) -> filters.Filter:
        """The filter of an action on all matching messages. Raises ``InvalidArgument``."""
        return filters.Filter.of(self.fields, self.zone)

    @property
    def asked(self) -> Asked:
        """What the question of an action on many was about. Raises ``InvalidArgument``."""
        return Asked.parse(self.fields.get(ASKED_FIELD, ""))

    def asking(self, about: Asked | str) -> Request:
        """The same request with a new question, or a new doubt."""
        return self._replace(fields={**self.fields, ASKED_FIELD: str(about)})

    @property
    def wanted(self) -> Callable[[Peeked], bool]:
        """Accepts the messages that match and that the question was about. Raises ``InvalidArgument``."""
        matches, about = self.filter.matches, self.asked
        return lambda message: matches(message) and about.holds(message)


class Outcome(NamedTuple):
    """``text``: what was done, for the user and the audit. ``missed``: how many messages had moved.

    ``following``: the mark to go on with; "" if all is done. ``audited``: the text for the audit, if it differs.
    ``number``: how many messages are done, for an action in parts.
    """

    text: str
    missed: int = 0
    following: str = ""
    audited: str = ""
    number: int = 0


class Field(NamedTuple):
    """An input of an action's form. ``kind``: text, number, json, moment, queue or task."""

    name: str
    label: str
    kind: str = "text"
    help: str = ""
    value: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Action:
    """An action of the catalogue. ``wording`` is its question.

    The question is formatted with ``target``, the ``number`` of selected or matching messages, ``which`` (the filter),
    ``to`` (where dead letters go: to the field ``to`` of the request, or home), and ``told``: a sentence about results.
    """

    name: str
    label: str
    wording: str
    run: Callable[[Broker, Request], Outcome]
    #: Whether it acts on selected messages; on one only.
    selects: bool = False
    selects_one: bool = False
    #: Whether it deletes something for good.
    destroys: bool = False
    #: The fields of its form, and a function that fills them in at first.
    fields: tuple[Field, ...] = ()
    prefill: Callable[[Broker, Request], Mapping[str, str]] | None = None
    #: Whether its form shows the arguments of a task: only for users who may see bodies.
    shows_body: bool = False
    #: Whether it acts on all that match the filter of the request's fields.
    by_filter: bool = False
    #: Whether it acts on ready or delayed messages, which workers take meanwhile; otherwise it acts on dead letters.
    on_waiting: bool = False
    #: Whether it acts on all queues of dead letters instead of a named one.
    everywhere: bool = False
    #: Whether it acts on all that wait in its queue.
    on_whole: bool = False
    #: Whether it acts on one key of a queue as well as on the whole of it.
    takes_key: bool = False
    #: Whether it acts on workers, for which a page's user needs a right of its own.
    on_workers: bool = False
    #: Returns a doubt about the fields, which the question shows; "" for none.
    doubt: Callable[[Request], str] | None = None

    def check(self, request: Request) -> None:
        """Refuse a key if the action is not for one key. Raises ``InvalidArgument``."""
        if request.key is not None and not self.takes_key:
            fix = "Ask without the key; the messages of a key are moved, or cancelled by a filter."
            raise InvalidArgument(f"{self.label} is not for one key", key=shown(request.key), fix=fix)

    def question(self, request: Request) -> str:
        """What is asked before it is done. Raises ``InvalidArgument``."""
        self.check(request)
        is_counted = self.by_filter or self.on_whole
        number = request.asked.tell(self.noun(request)) if is_counted else plural(len(request.spots), "message")
        told = request.untold or "Their results, if any, become REVOKED."
        which = f" that match {request.filter}" if request.filter else ""
        doubt = request.fields.get(ASKED_FIELD, "") if self.doubt is not None else ""
        to = f"all to {request.fields['to']}" if "to" in request.fields else "each to the queue it died in"
        return f"{self.wording.format(target=request, number=number, told=told, which=which, to=to)} {doubt}".rstrip()

    def noun(self, request: Request) -> str:
        """The noun for the messages of an action on many. Raises ``InvalidArgument``."""
        if self.on_whole:
            return "waiting message"
        return f"{request.state} message" if self.on_waiting else "dead letter"

    def ask(self, broker: Broker, request: Request) -> Request:
        """The request with a new question: the messages or the doubt of now. Raises ``InvalidArgument``."""
        if self.on_whole:
            return request.asking(Asked.of(broker, request.queue, request.key))
        if self.doubt is not None:
            return request.asking(self.doubt(request))
        if not self.by_filter:
            return request
        matches = request.filter.matches
        queues = sorted(filters.dead_queues(broker, look(broker))) if self.everywhere else [request.queue]
        about = Asked.about(
            (each.message for name in queues for each in listed(broker.queue(name), request.state)),
            lambda each: matches(each) and (not self.everywhere or filters.died_elsewhere(each, each.queue)),
        )._replace(by=max((broker.queue(each).mark() for each in queues), default=b""))
        return request.asking(about)

    def check_asked(self, broker: Broker, request: Request) -> None:
        """Check the confirmed question before the first part. Raises ``InvalidArgument``.

        Raises ``AskedAnew`` if messages are gone, or if there is a doubt that the question did not show.
        """
        if self.doubt is not None and self.doubt(request) not in {"", request.fields.get(ASKED_FIELD)}:
            raise AskedAnew("nothing was done yet", fix="Confirm again if this is what you want.")
        if self.by_filter and not self.on_waiting and not request.mark:
            request.asked.check(self.ask(broker, request).asked)

    def perform(self, broker: Broker, request: Request, audit: Audit) -> Outcome:
        """Do the action; its entry in the audit says how it ended. Raises what the action raises."""
        self.check(request)
        self.check_asked(broker, request)
        complete = audit(request.queue, f"{self.label} ({request}): begun.")
        ending = f"{self.label} ({request}): interrupted"
        try:
            outcome = self.run(broker, request)
            ending = outcome.audited or outcome.text
        except BaseException as error:
            reason = str(error) if isinstance(error, KombuFDBError) else f"{type(error).__name__}: {error}"
            ending = f"{self.label} ({request}): failed, {reason}"
            raise
        finally:
            complete(ending)
        return outcome

    def target(self, queue: str) -> str:
        """The target of a request that a page received for ``queue``."""
        return EVERYWHERE if self.everywhere else queue

    def read(self, given: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
        """The key and the fields of a ``Request``, from the fields that a page received."""
        of_filter = (*filters.FIELDS, "state") if self.by_filter else ()
        known = (*(each.name for each in self.fields), ASKED_FIELD, *of_filter)
        found = {name: given[name] for name in known if name in given}
        return None if self.by_filter else given.get("key"), found

    def form(self, broker: Broker, request: Request) -> list[Field]:
        """The form's fields with the values of the request, else with present ones.

        Raises what the store and ``prefill`` raise.
        """
        given = request.fields
        if self.prefill is not None and not any(each.name in given for each in self.fields):
            given = self.prefill(broker, request)
        return [each._replace(value=given.get(each.name, each.value)) for each in self.fields]


# -- the audit ---------------------------------------------------------------------------------------------------------


AUDIT_LOG = "celery_fdb.audit"
#: The format of a line on stderr.
AUDIT_LINE = "%(asctime)s %(name)s: %(message)s"


def log() -> logging.Logger:
    """The audit's logger at the level INFO. It writes to stderr if the program has no handler for it.

    Without this, entries would be lost: by default Python prints warnings only, and so do Django and most servers. A
    level that the program has set for this logger stays.
    """
    found = logging.getLogger(AUDIT_LOG)
    if not found.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(AUDIT_LINE))
        found.addHandler(handler)
    if found.level == logging.NOTSET and not found.isEnabledFor(logging.INFO):
        found.setLevel(logging.INFO)
    return found


#: Records one person's actions. Called before an action with the queue and a text; the function that it returns
#: completes the entry. If it raises, the action does not run.
Audit = Callable[[str, str], Callable[[str], None]]


def log_audit(user: str) -> Audit:
    """Entries in the log ``celery_fdb.audit``, two lines each, at the level INFO."""

    def begin(queue: str, text: str) -> Callable[[str], None]:
        def tell(text: str) -> None:
            log().info("%s on %s: %s", plain(user), plain(queue), plain(text))

        tell(text)
        return tell

    return begin


# -- in parts ----------------------------------------------------------------------------------------------------------


#: The most transactions of one request.
MOST_PARTS = 50


def in_parts(
    part: Callable[[bytes], Part], request: Request, verb: str, noun: str, of: str, *, first: bytes = b""
) -> Outcome:
    """Do part after part, from the request's mark or ``first`` on. Raises what ``part`` raises, ``InvalidArgument``.

    ``verb``, ``noun`` and ``of`` make the text: Replayed 2 dead letters of celery.dead. An error's attribute ``done``
    says how many messages the parts before it have done.
    """
    before, following = _read(request.mark)
    following, number = following or first, before
    ends = request.clock.monotonic() + request.seconds
    for done in range(MOST_PARTS):
        if done and request.clock.monotonic() >= ends:
            break
        try:
            found = part(following)
        except KombuFDBError as error:
            raise type(error)(error.text, **{**error.attributes, "done": number - before}) from error
        number, following = number + found.number, found.following or b""
        if not following:
            break
    # The form says how many were done before, for the page's text. The audit has the number of those done here.
    text, audited = (f"{verb} {plural(each, noun)} of {of}" for each in (number, number - before))
    if not following:
        return Outcome(f"{text}.", audited=f"{audited}.", number=number)
    rest = "the rest is still to be done."
    mark = f"{number}.{following.hex()}"
    return Outcome(f"{text} so far; {rest}", 0, mark, f"{audited}; {rest}", number)


def _read(mark: str) -> tuple[int, bytes]:
    if not mark:
        return 0, b""
    number, _, following = mark.partition(".")
    try:
        return int(number if number.isdecimal() else "none"), bytes.fromhex(following)
    except ValueError:
        raise InvalidArgument("no mark of an action", given=shown(mark), fix="Begin it anew.") from None
