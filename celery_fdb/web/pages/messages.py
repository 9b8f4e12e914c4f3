"""``/messages``, ``/message``, ``/dead``, ``/causes``: a queue's messages, one of them, and dead letters by cause.

A message is named by its place (:class:`~kombu_fdb.model.Spot`), so each page costs the same in a queue of any
length; a search looks at a bounded number of messages and says how far it came.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.responses import Response

from celery_fdb.inspection import filters
from celery_fdb.inspection.message import MessageView
from celery_fdb.inspection.overview import STATES, QueueView, look
from celery_fdb.operations.action import Action
from celery_fdb.operations.catalogue import named
from celery_fdb.web.request_context import MOST_SHOWN, RequestContext, known, spot_of
from kombu_fdb import Broker
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.model import State

# -- messages ----------------------------------------------------------------------------------------------------------


#: The most characters of a body that are shown.
LONGEST_BODY = 100_000


def messages(context: RequestContext, broker: Broker) -> Response:
    """A queue's messages in one state that match the filter."""
    name, state = context.asked("queue"), _state(context)
    reverse, wanted = context.asked("order") == "newest", wanted_of(context)
    size, now_ms = context.settings.page_size, context.settings.clock.wall_ms()
    found, looked_at, following = filters.search(
        broker.queue(name), wanted, size, state=state, reverse=reverse, after=_after(context)
    )
    rows = [MessageView.of(each, now_ms) for each in found]
    kept = {"queue": name, "state": state, "order": "newest" if reverse else None, **wanted.fields()}
    return context.page(
        "messages",
        queue=name,
        is_dead=name.endswith(DEAD_SUFFIX),
        state=state,
        counts=broker.queue(name).stats(),
        states=STATES,
        rows=rows,
        wanted=wanted,
        kept=kept,
        choices={
            "task": context.tasks(*(row.title for row in rows if row.envelope is not None)),
            "key": known(each for each in (*broker.queue(name).keys(limit=size), *(row.message.key for row in rows))),
            "error": known(row.error for row in rows),
        },
        spoken=filters.REASONS,
        reasons=known(
            (*filters.REASONS, wanted.reason, *(row.message.deaths[0].reason for row in rows if row.message.deaths))
        ),
        looked_at=looked_at,
        following=None if following is None else following.hex(),
        reverse=reverse,
        actions=context.allowed(offered(name, rows)),
        actions_on_all=_offered_on_all(name, rows),
    )


def message(context: RequestContext, broker: Broker) -> Response:
    """One message; with its body only if the user may see it and asks for it."""
    name, spot = context.asked("queue"), spot_of(context.asked("spot"))
    listed = broker.queue(name).at(spot)
    if listed is None:
        raise HTTPException(404, "The message is no longer here: a worker took it, or it was moved or deleted.")
    row = MessageView.of(listed, context.settings.clock.wall_ms())
    asked = context.may_see_bodies and bool(context.asked("body"))
    return context.page(
        "message",
        queue=name,
        is_dead=name.endswith(DEAD_SUFFIX),
        row=row,
        headers=row.headers(with_arguments=asked),
        properties=row.properties(),
        body=row.body() if asked else None,
        longest_body=LONGEST_BODY,
        actions=context.allowed(offered(name, [row])),
    )


def offered(queue: str, rows: Sequence[MessageView]) -> list[Action]:
    """The actions for selected messages, all in one state.

    Dead letters can be replayed and discarded, wherever a dead-letter exchange has put them. Other messages can be
    cancelled and, unless a worker holds them, rescheduled.
    """
    states = {row.message.state for row in rows}
    if queue.endswith(DEAD_SUFFIX) and states <= {"ready"}:
        return named("replay", "edit", "discard")
    has_strangers = any(filters.died_elsewhere(row.message, queue) and row.message.state == "ready" for row in rows)
    due = ["run_now", "reschedule"] if "delayed" in states else ["reschedule"] if "ready" in states else []
    return named(*(["replay", "edit"] if has_strangers else []), *due, "cancel")


def _offered_on_all(queue: str, rows: Sequence[MessageView]) -> list[Action]:
    """The actions for all messages of the queue in this state, or all that match a filter."""
    states = {row.message.state for row in rows}
    if queue.endswith(DEAD_SUFFIX):
        return named("replay_all", "discard_all") if states == {"ready"} else []
    return named("cancel_all") if states and "leased" not in states else []


def wanted_of(context: RequestContext) -> filters.Filter:
    """The filter in the address, without its empty fields. Raises ``HTTPException``."""
    given = {name: value for name in filters.FIELDS if (value := context.request.query_params.get(name))}
    context.asked_arguments()
    return filters.Filter.of(given, context.zone)


def _state(context: RequestContext) -> State:
    asked = context.asked("state", "ready")
    for each in STATES:
        if asked == each:
            return each
    raise HTTPException(404, "Messages are ready, delayed or leased.")


def _after(context: RequestContext) -> bytes:
    try:
        return bytes.fromhex(context.asked("after"))
    except ValueError:
        raise HTTPException(404, "There is no such page.") from None


# -- dead letters ------------------------------------------------------------------------------------------------------


#: The most causes that are shown.
MOST_GROUPS = 100


def dead(context: RequestContext, broker: Broker) -> Response:
    """Dead letters: with ``queue`` by their causes, without it the queues that hold them."""
    if "queue" in context.request.query_params:
        name = context.asked("queue")
        return _causes(context, broker, [name], queue=name)
    held = _held(broker)
    shown = [(each, ", ".join(sorted(homes))) for each, homes in held[:MOST_SHOWN]]
    return context.page("dead", queues=shown, total=len(held))


def causes(context: RequestContext, broker: Broker) -> Response:
    """The causes in all queues of dead letters, the longest queue first."""
    return _causes(context, broker, [each.name for each, _ in _held(broker) if each.ready], queue=None)


def _held(broker: Broker) -> list[tuple[QueueView, set[str]]]:
    """The queues of dead letters, the longest first, each with the queues whose letters it holds."""
    seen = look(broker)
    homes = filters.dead_queues(broker, seen)
    held = [(each, homes[each.name]) for each in seen.queues if each.name in homes]
    return sorted(held, key=lambda each: (-each[0].ready, each[0].name))


def _causes(context: RequestContext, broker: Broker, queues: Sequence[str], *, queue: str | None) -> Response:
    """The page of causes in these queues. ``queue``: the only one, None for all."""
    groups, counted, is_whole = filters.group(broker, queues, wanted_of(context), only_dead=queue is None)
    return context.page(
        "causes",
        queue=queue,
        home="all queues" if queue is None else queue.removesuffix(DEAD_SUFFIX),
        groups=groups[:MOST_GROUPS],
        hidden=max(len(groups) - MOST_GROUPS, 0),
        counted=counted,
        total=filters.letters_in(broker, queues),
        is_whole=is_whole,
        actions=named(*(f"{each}_{'everywhere' if queue is None else 'all'}" for each in ("replay", "discard"))),
    )
