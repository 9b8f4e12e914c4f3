"""``/act``: a deed is asked for, shown as a question, and done when the question comes back confirmed.

What takes nothing away and is undone by one click is done at once. The audit tells who did it, before and after.
"""

from __future__ import annotations

from starlette.responses import Response

from celery_fdb.operations.audit import LogAudit
from celery_fdb.operations.catalogue import DEEDS
from celery_fdb.operations.deed import Deed, Request, names_of, perform
from celery_fdb.web.page import NotThere
from celery_fdb.web.pages.messages import spot_of
from celery_fdb.web.serving.reception import notify
from celery_fdb.web.visit import Visit
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError, StoreError

__all__ = ["act"]

#: Messages that one deed may be asked for.
MOST_SELECTED = 500
AT_ONCE = frozenset({"pause", "resume"})
FIX_APP = "Start the dashboard with an app (celery -A proj fdb web, or dashboard(app)) so that results become REVOKED."


def act(visit: Visit, broker: Broker) -> Response:
    """Ask, and when the answer is yes, act."""
    deed = DEEDS.get(visit.sent("deed"))
    if deed is None:
        raise NotThere("There is no such deed. Nothing was changed.")
    queue, key = visit.sent("queue"), visit.fields.get("key", [None])[0]
    spots = [spot_of(token) for token in visit.fields.get("selected", [])[:MOST_SELECTED]]
    if deed.selects and not spots:
        return back(visit, "Select messages first. Nothing was changed.")
    asked = Request(queue, spots, key, names_of(broker, queue, spots), visit.settings.app, FIX_APP)
    if visit.sent("confirmed") or deed.name in AT_ONCE:
        return _do(visit, broker, deed, asked)
    return visit.page("question", deed=deed, asked=asked, question=deed.question(asked), back=visit.sent("back"))


def _do(visit: Visit, broker: Broker, deed: Deed, asked: Request) -> Response:
    try:
        outcome = perform(broker, deed, asked, LogAudit(visit.user.name))
    except StoreError:
        raise
    except KombuFDBError as error:
        return back(visit, str(error))
    return back(visit, outcome.text)


def back(visit: Visit, text: str) -> Response:
    """Where the person came from, with one line about what was done."""
    answer = visit.redirect(visit.way_back(visit.sent("back")))
    notify(visit, answer, text)
    return answer
