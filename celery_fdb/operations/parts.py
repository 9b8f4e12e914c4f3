"""An action on very many messages, in parts: some transactions, then it says how far it is and where it goes on.

It ends after :data:`MOST_PARTS`, or when its time is over, whichever is first; one part is always done.

The mark that it goes on with is text for a form: how many it has done, and where it is.
"""

from __future__ import annotations

from collections.abc import Callable

from celery_fdb.operations.action import Outcome, Request
from kombu_fdb.errors import InvalidArgument, KombuFDBError
from kombu_fdb.model import Part
from kombu_fdb.primitives.plural import plural
from kombu_fdb.primitives.ranges import shown

#: Transactions of one request.
MOST_PARTS = 50


def in_parts(
    part: Callable[[bytes], Part], request: Request, verb: str, noun: str, of: str, *, first: bytes = b""
) -> Outcome:
    """Part after part, from the request's mark on, or from ``first``. Raises what ``part`` does, ``InvalidArgument``.

    For example: Replayed 2 dead letters of celery.dead. An error tells with ``done`` how many messages the parts before
    it have done.
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
    # How many were done before, the form says, for who reads the page. The audit tells of those done here.
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
