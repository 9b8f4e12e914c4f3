"""An action on very many messages, in parts: some transactions, then it says how far it is and where it goes on.

It ends after :data:`MOST_PARTS`, or when its time is over, whichever is first; one part is always done.

The mark that it goes on with is text for a form: how many it has done, and where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from celery_fdb.operations.action import Outcome, Request
from kombu_fdb.errors import InvalidArgument, KombuFDBError
from kombu_fdb.model import Part
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

#: Transactions of one request.
MOST_PARTS = 50


class Progress(NamedTuple):
    """``number`` of messages since the beginning, and the mark to go on with; "" at the end.

    How many were done before, the form says, for who reads the page. The audit tells of those done ``here``.
    """

    number: int
    following: str
    here: int

    def tell(self, verb: str, noun: str, of: str) -> Outcome:
        """For example: Replayed 2 dead letters of celery.dead."""
        done, here = (f"{verb} {plural(number, noun)} of {of}" for number in (self.number, self.here))
        if not self.following:
            return Outcome(f"{done}.", audited=f"{here}.", number=self.number)
        rest = "the rest is still to be done."
        return Outcome(f"{done} so far; {rest}", 0, self.following, f"{here}; {rest}", self.number)


def in_parts(part: Callable[[bytes], Part], request: Request, first: bytes = b"", most: int = MOST_PARTS) -> Progress:
    """Part after part, from the request's mark on, or from ``first``. Raises what ``part`` does, ``InvalidArgument``.

    An error tells with ``done`` how many messages the parts before it have done.
    """
    before, following = _read(request.mark)
    following, number = following or first, before
    ends = request.clock.monotonic() + request.seconds
    for done in range(most):
        if done and request.clock.monotonic() >= ends:
            break
        try:
            found = part(following)
        except KombuFDBError as error:
            raise type(error)(error.text, **{**error.attributes, "done": number - before}) from error
        number, following = number + found.number, found.following or b""
        if not following:
            return Progress(number, "", number - before)
    return Progress(number, f"{number}.{following.hex()}", number - before)


def _read(mark: str) -> tuple[int, bytes]:
    if not mark:
        return 0, b""
    number, _, following = mark.partition(".")
    try:
        return int(number if number.isdecimal() else "none"), bytes.fromhex(following)
    except ValueError:
        raise InvalidArgument("no mark of an action", given=shown(mark), fix="Begin it anew.") from None
