"""What some twins do instead of what the engine does; each is wrong in one respect. See ``twins.py``."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

from kombu_fdb.engine.facade.upkeep import Upkeep
from kombu_fdb.engine.messages import claim, message
from kombu_fdb.engine.scheduling import key_limits
from kombu_fdb.engine.work import Work
from kombu_fdb.errors import KombuFDBError, StoreError, StoreUnavailable
from kombu_fdb.keyspace.codec import Record
from kombu_fdb.model import Rank
from kombu_fdb.process.client import Client
from kombu_fdb.process.client_session import ClientSession
from kombu_fdb.store import retry
from kombu_fdb.store.protocol import Transaction
from kombu_fdb.transport.consuming.dispatch import Credit, Dispatch
from kombu_fdb.transport.consuming.fetcher import Claiming, Fetcher

#: Longer than any call lasts.
ANSWER_S = 20.0

_attempt, _commit, _put_ready = retry.Retry._attempt, retry.Retry._commit, message.put_ready
_refilled, _take = key_limits.refilled, claim.take
_redelivered = Record.redelivered
_clear_dedup_part = Upkeep.clear_dedup_part
_with_acks, _remove = Claiming._with_acks, Dispatch.remove
_end_consumers = ClientSession.end_consumers


def settle_a_part(client: Client, engine: Any, client_session: Any) -> None:
    with suppress(KombuFDBError):
        engine.messages.ack(client.take_acks([]))
        client_session.close()


def wake_for_keys(work: Work, queue: str, key: str, rank: Rank, message: Any) -> None:
    bells = set(work.effects._bells)
    _put_ready(work, queue, key, rank, message)
    if queue.startswith("fair") and not key:
        work.effects._bells &= bells


def only_in_time(run: retry.Retry, tr: Transaction, doubt: Any, *args: Any) -> None:
    began_s = run.clock.monotonic()
    _commit(run, tr, doubt, *args)
    if run.clock.monotonic() - began_s > ANSWER_S:
        raise StoreUnavailable("no answer in time")


def leave_open(run: retry.Retry, body: Any, *args: Any) -> Any:
    """Cancels for the store's errors only."""

    def keeping_it_open(tr: Any) -> Any:
        try:
            return body(tr)
        except StoreError:
            raise
        except BaseException:
            tr.cancel = lambda: None
            raise

    return _attempt(run, keeping_it_open, *args)


def fill_twice(row: bytes | None, limits: Any, now_ms: int, unchanged_ms: int) -> key_limits.Bucket:
    bucket, before = _refilled(row, limits, now_ms, unchanged_ms), key_limits._decode(row)
    return bucket if before is None else bucket._replace(filled_ms=before.filled_ms)


def fill_by_own_clock(row: bytes | None, limits: Any, now_ms: int, unchanged_ms: int) -> key_limits.Bucket:
    return _refilled(row, limits, now_ms, unchanged_ms)._replace(filled_ms=now_ms)


def live_anew(value: bytes) -> bytes:
    """Its time to live begins again whenever it comes back."""
    record = Record.decode(value)
    lives_ms = record.expires_ms and record.expires_ms - record.published_ms
    return _redelivered(value).replace(
        record.expires_ms.to_bytes(8, "big"), (record.expires_ms + lives_ms).to_bytes(8, "big"), 1
    )


def never_expired(work: Work, row: Any, record: Any, states: Any, window: Any) -> Any:
    return _take(work, row, record._replace(expires_ms=0) if isinstance(record, Record) else record, states, window)


def clear_at_once(engine: Any, **_: Any) -> int:
    return _clear_dedup_part(engine, kept_ms=0)


def clear_after_the_look(fetcher: Fetcher) -> float | None:
    called, fetcher._answered = fetcher._called, -1
    pause_s = fetcher._step()
    fetcher._watch_set.bell.clear()
    if pause_s != 0 and fetcher._first_ack is None and not fetcher._fruitless:
        fetcher._answered = called
    return pause_s


def forget_the_acks(claiming: Claiming, client_session: Any, act: Any) -> Any:
    taken = list(claiming._client.acks)
    try:
        return _with_acks(claiming, client_session, act)
    except BaseException:
        for lease in taken:
            with suppress(ValueError):
                claiming._client.acks.remove(lease)
        raise


def keep_what_waits(dispatch: Dispatch, subscription: Any) -> None:
    _remove(dispatch, subscription)
    dispatch._leaving.clear()


def promise_twice(claiming: Claiming, plan: Any) -> None:
    """And keep both promises: else what there is no room for would just go back."""
    dispatch: Any = claiming._dispatch
    dispatch._choose = lambda queue: dispatch._by_queue[queue][0]
    plan.queues = [queue for queue in plan.queues if queue not in claiming.combiner.queues] or plan.queues


def count_what_is_held(credit: Credit) -> int:
    return credit.prefetch - len(credit.held.leases)


def end_at_once(client_session: ClientSession, tags: Collection[str]) -> None:
    client_session.recover = lambda: None  # type: ignore[method-assign]  # for one call
    try:
        _end_consumers(client_session, tags)
    finally:
        del client_session.recover


def just_leave(client_session: ClientSession, demand: Any) -> None:
    client_session._engine.messages.leave(demand)
    client_session._claims.pop(demand.first, None)
