"""What people do to a broker through a page: each deed with its question, and how it is done under an audit.

A deed is asked for, shown as a question, and done when the question comes back confirmed. It acts on messages where
they were seen. One that has moved meanwhile, because a worker took it or somebody else was faster, is left alone and
counted as missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from celery import Celery

from celery_fdb.inspection.row import row_of
from celery_fdb.operations.audit import Audit
from kombu_fdb import Broker, Spot
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.primitives.clock import SystemClock
from kombu_fdb.primitives.plural import plural

__all__ = ["Deed", "Outcome", "Request", "names_of", "perform"]


class Request(NamedTuple):
    """What a deed is to act upon."""

    queue: str
    spots: Sequence[Spot] = ()
    #: None: the whole queue.
    key: str | None = None
    #: What people call the messages, by message id.
    names: Mapping[bytes, str] = {}
    #: The project's, for the results of its tasks; without one, what the user is to do.
    app: Celery | None = None
    fix_app: str = ""

    def __str__(self) -> str:
        if self.key is not None:
            return f"key {self.key!r} of {self.queue}"
        return self.queue

    @property
    def untold(self) -> str:
        """Who is not told of a deed, without an app; "" with one."""
        if self.app is not None:
            return ""
        return f"Results and chords are not updated, because no Celery app is known here. {self.fix_app}".rstrip()


class Outcome(NamedTuple):
    """``text``: what was done, for the user and the audit. ``missed``: messages that had moved."""

    text: str
    missed: int = 0


@dataclass(frozen=True, slots=True)
class Deed:
    """``wording`` is the question, formatted with ``target``, ``number`` and ``told``, what becomes of results."""

    name: str
    label: str
    wording: str
    run: Callable[[Broker, Request], Outcome]
    #: Acts on messages that were selected.
    selects: bool = False
    #: Takes something away for good.
    destroys: bool = False

    def question(self, request: Request) -> str:
        """What is asked before it is done."""
        number = plural(len(request.spots), "message")
        told = request.untold or "Their results, if any, become REVOKED."
        return self.wording.format(target=request, number=number, told=told)


def perform(broker: Broker, deed: Deed, request: Request, audit: Audit) -> Outcome:
    """Do it, with an entry of the audit that tells how it ended. Raises what the deed raises."""
    entry = audit.begin(request.queue, f"{deed.label} ({request}): begun.")
    ending = f"{deed.label} ({request}): interrupted"
    try:
        outcome = deed.run(broker, request)
        ending = outcome.text
    except BaseException as error:
        reason = str(error) if isinstance(error, KombuFDBError) else f"{type(error).__name__}: {error}"
        ending = f"{deed.label} ({request}): failed, {reason}"
        raise
    finally:
        entry.complete(ending)
    return outcome


def names_of(broker: Broker, queue: str, spots: Sequence[Spot]) -> dict[bytes, str]:
    """Task and id of the messages that are still there, by message id."""
    now_ms = SystemClock().wall_ms()
    seen = [broker.queue(queue).at(each) for each in spots]
    rows = [row_of(each, now_ms) for each in seen if each is not None]
    return {row.spot.message_id: f"{row.title} {row.id}" for row in rows}
