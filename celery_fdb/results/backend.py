"""The result backend: Celery's interface to the results in the store.

States, results, groups, waiting, and what Celery asks of chords; how a chord is counted and published once is in
``chords.py``, with its guarantees.

Model. One backend per application and process, for all its threads. It opens the process's client of the store when it
is first used, the same one that the broker uses if URL and options are the same, and a forked child opens its own.

What happens when the store does not answer: every call raises kombu's ``OperationalError`` after ``operation_timeout``,
or after ``connect_timeout`` if it is the first; but what *waits* goes on waiting, up to its own timeout (and its error
is Celery's ``TimeoutError``, too), and what a *task* stores as it ends is repeated as ``retry_policy`` says (about two
minutes by default), and then as ``result_backend_always_retry`` says. ``get()`` of a result with parents asks for their
states before it waits: that is a call like any other.

What workers do for the result store besides storing: delete what has expired, publish abandoned chords.

Model of the sweeper. Each worker's main process has one daemon thread from the moment the worker is ready until it
shuts down. No caller is elected: the first to delete or to take over wins, and the others get a conflict. A look that
finds nothing costs two small reads. Children sweep a little after a task now and then, so that it is done also where no
worker of Celery's own runs.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from time import monotonic
from typing import Any, TypeVar

import celery
from celery import Celery, states
from celery.app.task import Context
from celery.backends.base import BaseBackend
from celery.canvas import _chain, chord, group, maybe_signature
from celery.exceptions import ChordError, TaskRevokedError
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.result import AsyncResult, GroupResult, allow_join_result, result_from_tuple
from celery.signals import worker_ready, worker_shutting_down
from celery.utils.functional import _regen
from celery.utils.log import get_logger
from celery.utils.saferepr import saferepr
from kombu.exceptions import EncodeError, OperationalError
from kombu.utils.encoding import bytes_to_str, ensure_bytes
from kombu.utils.functional import retry_over_time
from kombu.utils.url import maybe_sanitize_url

from celery_fdb import brokers
from celery_fdb.results import chords, records
from celery_fdb.results.store import ResultStore, Sighting
from celery_fdb.results.waiting import Waiting
from kombu_fdb.errors import KombuFDBError, OptionError, StoreError
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.failure import TRACEBACK_LENGTH
from kombu_fdb.primitives.ranges import LONGEST_S, is_number, is_whole
from kombu_fdb.process.client import Client, client_for
from kombu_fdb.settings.location import Location, locate, parse_url
from kombu_fdb.settings.options import Options, parse_options
from kombu_fdb.store.retry import ENDING_S
from kombu_fdb.transport.connection import is_stopping
from kombu_fdb.transport.errors import UNANSWERED, Unanswered, operational_errors

logger = get_logger(__name__)

# -- addresses ---------------------------------------------------------------------------------------------------------


#: Options that other result backends read from the same setting; harmless here.
_FOREIGN = frozenset({"additional_connection_errors", "result_chord_ordered"})


def full_url(url: str | None) -> str:
    """The whole URL: Celery cuts ``fdb+sqlite:///path`` at the plus sign and hands over the second half."""
    if not url:
        return "fdb://"
    return f"fdb+{url}" if url.startswith(("sqlite:", "memory:")) else url


#: The default ``retry_policy``. A full disk refuses at once: the twenty attempts of Celery's take twenty seconds.
_TWO_MINUTES = {"max_retries": None, "timeout": 120, "interval_max": 5}


def settings_of(conf: Any, url: str) -> tuple[Location, Options, Options, dict[str, Any]]:
    """Where the results are, their options, those of the client that opens their store, and the retry policy.

    They stand in ``result_backend_transport_options``. If the broker has the same URL, ``broker_transport_options``
    hold where they are not overruled, and the client's options are the broker's if both are in the same place: then
    they share one open store. Raises ``OptionError``.
    """
    if conf.get("result_compression") and tuple(celery.VERSION[:2]) < (5, 7):  # Celery ignores what it does not know
        logger.warning(
            "result_compression needs Celery 5.7, and this is %s: results are stored as they are", celery.__version__
        )
    timeout_s = conf.broker_connection_timeout or None
    own: dict[str, Any] = dict(conf.get("result_backend_transport_options") or {})
    policy = dict(own.pop("retry_policy", None) or _TWO_MINUTES)
    for name in _FOREIGN:
        own.pop(name, None)
    if not any(url in brokers.urls_of(urls) for urls in (conf.broker_url, conf.broker_write_url, conf.broker_read_url)):
        options = parse_options(own, connect_timeout=timeout_s)
        return locate(parse_url(url), options), options, options, policy
    configured: dict[str, Any] = dict(conf.broker_transport_options or {})
    options = parse_options({**configured, **own}, connect_timeout=timeout_s)
    of_broker = parse_options(configured, connect_timeout=timeout_s)
    location = locate(parse_url(url), options)
    shared = location == locate(parse_url(url), of_broker)
    return location, options, of_broker if shared else options, policy


# -- the backend -------------------------------------------------------------------------------------------------------


T = TypeVar("T")

#: An attribute of a task's request: the task's id, once its part of a chord was counted.
COUNTED = "fdb_part_counted"
#: Another: whether the state that is stored is the one with which the task returns.
RETURNING = "fdb_returning"
#: Another: that the state with which the task returned was repeated in vain.
REPEATED = "fdb_repeated"
#: Characters that are kept of an error that is too large.
SHOWN_LENGTH = 500
#: What is kept with it whatever the maximum is.
LEAST = {"status", "result", "task_id", "date_done", "group_id", "parent_id", "name", "worker", "queue", "retries"}
#: Seconds for which an abandoned chord is left to a worker that knows its body, of so many chords. A deployment may
#: stop all of these for a minute or two; after that there may be none, as they may have their results elsewhere.
LEFT_S, MOST_LEFT = 300.0, 1_000
#: Seconds between two renewals of a chord's claim.
RENEW_S = chords.CLAIM_MS / 3000
#: Seconds between two looks for what has expired, with jitter.
INTERVAL_S = 5.0
#: Transactions of one look, so that a large heap of expired results is cleared in turns.
SWEEP_PARTS = 20


class ResultTooLarge(EncodeError):
    """The encoded result is over the maximum; it was not stored, the task's state is FAILURE with this error.

    An ``EncodeError``, because Celery makes a failure of one, as it does of a result that can't be encoded.
    """


class TimeoutUnanswered(Unanswered, CeleryTimeoutError):
    """The time to wait for a result is over, and the store does not answer: a caller may catch it as either."""


class FdbBackend(BaseBackend):
    """The result backend of ``fdb://`` and ``fdb+sqlite://``."""

    supports_native_join = True
    supports_result_compression = True
    supports_failure_expires = True
    expires: float | None

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        """Raises ``OptionError`` for a URL or option that can't be right; touches no store."""
        super().__init__(app, url=full_url(url), **kwargs)
        self.thread_safe = True  # one client for all threads
        self.expires = self._seconds(None, self.expires)
        self.failure_expires = self._seconds(app.conf.get("result_failure_expires"), self.expires)
        self.chord_expires = self._seconds(app.conf.get("result_chord_expires"), self.expires)
        self.location, self.options, self._client_options, policy = settings_of(app.conf, self.url)
        self.retry_policy = {**BaseBackend.retry_policy, **policy}
        self._clock = Clock()
        self._client: Client | None = None
        self._store: ResultStore | None = None
        #: Since when an abandoned chord is left to another worker.
        self._left: dict[str, float] = {}
        #: The process that has the sweeper's thread, the event that stops it, and when the end of a task sweeps next.
        self._sweeper_pid = 0
        self._stopped = threading.Event()
        self._next_s = monotonic() + INTERVAL_S
        # Before 5.7, Celery takes a method of two objects for the same receiver, unless each is named.
        name = object()
        worker_ready.connect(self._on_ready, dispatch_uid=name)
        worker_shutting_down.connect(self._on_shutdown, dispatch_uid=name)

    def _seconds(self, value: Any, default: float | None) -> float | None:
        seconds = default if value is None else self.prepare_expires(value)
        if seconds is not None and not is_number(seconds, -math.inf, LONGEST_S):
            raise OptionError(
                "the results' lifetime is too long", given=repr(value)[:80], fix=f"Use at most {LONGEST_S:,} s."
            )
        return seconds

    # -- the store ---------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The process's client of the store, opened. Raises ``OperationalError``."""
        return self._attached(self.options.connect_timeout)

    @operational_errors
    def _attached(self, timeout_s: float) -> Client:
        client = self._client
        if client is None or client.pid != os.getpid():
            client = client_for(self.location, self._client_options)
            client.attach(self, timeout_s=timeout_s)
            self._client, self._store = client, None
        return client

    @property
    def store(self) -> ResultStore:
        """Raises ``OperationalError``."""
        client = self.client
        store = self._store
        if store is None:
            store = self._store = ResultStore(
                client.database,
                self.location.namespace,
                clock=self._clock,
                timeout_s=self.options.operation_timeout,
                sessions=client.engine.inspect.sessions,
            )
        return store

    def ensure(self, verb: Callable[[], T]) -> T:
        """Repeat what a worker has to store as ``retry_policy`` says: no caller is left to repeat it.

        A worker that was told to stop goes on for some seconds. (The processes of a prefork pool don't know of it.)
        """
        policy = {**self.retry_policy}
        # By this clock: kombu's own timeout ends where the wall clock is set forward.
        end_s = monotonic() + (policy.pop("timeout", None) or math.inf)

        def pause(error: BaseException, intervals: Iterator[float], retries: int) -> float:
            nonlocal end_s
            seconds = float(next(intervals))
            if is_stopping():
                seconds = min(seconds, 1.0)
                end_s = min(end_s, monotonic() + ENDING_S)
            if monotonic() > end_s:
                try:
                    raise error
                finally:
                    del error  # its frames refer to this local
            logger.warning("a result could not be stored, attempt %d follows in %g s: %s", retries + 2, seconds, error)
            return seconds

        found: T = retry_over_time(verb, UNANSWERED, errback=pause, **policy)
        return found

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        return isinstance(exc, UNANSWERED)

    def as_uri(self, include_password: bool = False) -> str:
        """The URL; the id of a cluster is as good as a password and is masked."""
        if include_password or self.url.startswith("fdb+sqlite"):
            return str(self.url)
        return str(maybe_sanitize_url(self.url)).removesuffix("/") if "@" in self.url else str(self.url)

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url, "expires": self.expires})

    # -- states ------------------------------------------------------------------------------------------------------

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        """Store a state. A success is not overwritten: a later state is from a run that was given up."""
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = task_id = _text(task_id)
        payload = self._encode_meta(meta)
        part = None
        if getattr(request, RETURNING, False):  # else it is ``update_state`` of a task that goes on
            part = self._part(request, task_id, state, result, stored=payload)
        expires = self.failure_expires if state == states.FAILURE else self.expires
        # The last part of a chord reads the results of the others.
        moments = (expires, self.chord_expires) if part is not None else (expires,)
        expires_ms = self._moment(*moments)

        def store() -> bool:  # ``update_state(meta=...)`` gives no state
            return self.store.store(task_id, str(state), payload, expires_ms, part)

        try:
            counted = store() if request is None or hasattr(request, REPEATED) else self.ensure(store)
        except UNANSWERED:
            if getattr(request, RETURNING, False):  # next, Celery stores this error as the task's failure
                setattr(request, REPEATED, True)
            raise
        if counted:
            setattr(request, COUNTED, task_id)
        return result

    def _part(
        self, request: Any, task_id: str, state: str, result: Any, *, stored: bytes | None = None
    ) -> chords.ChordPart | None:
        """The task's part of a chord, if it is one and has returned. ``result`` is encoded for storage."""
        if request is None or not request.chord or not request.group or state not in self.READY_STATES:
            return None
        if not task_id or request.id != task_id:
            return None
        index = request.group_index
        place = index if is_whole(index, 0, records.LAST_PLACE) else records.LAST_PLACE
        elsewhere = stored is not None and len(stored) > records.INLINE_BYTES
        payload = None if elsewhere else self._encode_part(result, state)
        return chords.ChordPart(request.group, place, task_id, state, payload, int(1000 * (self.chord_expires or 0)))

    def _encode_meta(self, meta: dict[str, Any]) -> bytes:
        """The state in bytes. An error that is too large becomes one that says so: it is stored in any case."""
        try:
            return self._encode_checked(meta)
        except ResultTooLarge as error:
            if meta["status"] not in states.EXCEPTION_STATES:
                raise
            traceback = meta["traceback"] and str(meta["traceback"])[:TRACEBACK_LENGTH]
            meta = {**meta, "result": self._too_large(meta["result"], error), "traceback": traceback}
            try:
                return self._encode_checked(meta)
            except ResultTooLarge:  # the tasks that it has published may be too many, or an extended result's arguments
                least = {name: meta[name] if name in LEAST else None for name in meta}
                return self._payload(least)

    def _encode_part(self, result: Any, state: str) -> bytes:
        try:
            return self._encode_checked(result)
        except ResultTooLarge as error:
            if state not in states.EXCEPTION_STATES:
                raise
            return self._payload(self._too_large(result, error))

    def _too_large(self, result: Any, error: ResultTooLarge) -> Any:
        """What is stored instead of an error that is too large. ``result``: that one, encoded for storage."""
        return self.prepare_exception(ResultTooLarge(f"{error} It was {saferepr(result, maxlen=SHOWN_LENGTH)}"))

    def _payload(self, value: Any) -> bytes:
        payload: bytes = ensure_bytes(self.encode(value))
        return payload

    def _encode_checked(self, value: Any) -> bytes:
        payload = self._payload(value)
        if len(payload) > self.options.max_message_size:
            raise ResultTooLarge(
                f"the result is too large (size: {len(payload)}, max message size: {self.options.max_message_size}). "
                "Store the data elsewhere and return a reference, or raise max_message_size in "
                "result_backend_transport_options (9,000,000 at most)."
            )
        return payload

    def _moment(self, *seconds: float | None) -> int:
        """When the longest of these has passed, in milliseconds; 0 (never) if one of them is None or 0."""
        if not all(seconds):
            return 0
        return self._clock.wall_ms() + max(1, int(1000 * max(each for each in seconds if each)))

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        record = self.store.load(_text(task_id))
        if record is None:
            return {"status": states.PENDING, "result": None}
        return self._meta(record)

    def _meta(self, record: records.StoredResult) -> dict[str, Any]:
        meta: dict[str, Any] = self.decode_result(record.payload)
        return meta

    def task_result_exists(self, task_id: str) -> bool:
        return self.store.exists(_text(task_id))

    def _forget(self, task_id: str) -> None:
        self.store.forget(_text(task_id))

    # -- groups ------------------------------------------------------------------------------------------------------

    def _save_group(self, group_id: str, result: Any) -> Any:
        payload = self._encode_checked({"result": result.as_tuple()})
        self.store.save_group(_text(group_id), payload, self._moment(self.expires))
        return result

    def _restore_group(self, group_id: str) -> dict[str, Any] | None:
        record = self.store.load_group(_text(group_id))
        if record is None:
            return None
        meta: dict[str, Any] = self.decode(record.payload)
        meta["result"] = result_from_tuple(meta["result"], self.app)
        return meta

    def _delete_group(self, group_id: str) -> None:
        self.store.delete_group(_text(group_id))

    # -- chords: open --------------------------------------------------------------------------------------------------

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        """Open the chord, before its header is published. Forgets an earlier run of the same frozen chord."""
        group_id, results = header_result_args[:2]
        expires_ms = self._moment(self.chord_expires)
        try:
            payload = self._encode_checked(body)
        except (EncodeError, TypeError):  # only the tasks' serializer can: then only a task of the header publishes it
            payload = None
        self.store.open_chord(group_id, payload, expires_ms)
        # A generator is not looked at: its tasks are made while they are published.
        if not isinstance(results, _regen) and any(isinstance(each, GroupResult) for each in results):
            # Of groups inside the header, the structure is needed when the results are joined.
            saved = self._encode_checked({"result": self.app.GroupResult(*header_result_args).as_tuple()})
            self.store.save_group(group_id, saved, expires_ms)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Celery calls this before the last header task is published."""
        self.store.enlarge_chord(group_id, size=chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """Celery calls this for ``self.add_to_chord(signature)`` in a header task."""
        self.store.enlarge_chord(chord_id, joined=result.id)

    # -- chords: count -------------------------------------------------------------------------------------------------

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Celery calls this when a header task has returned. Its part is in the store already if its result is."""
        part = self._part(request, request.id, state, self.encode_result(result, state))
        if part is None:
            return
        step = self._claim(part, request)
        # A part that was counted may find that another one, which came after it, has published the body.
        if step == "late" and getattr(request, COUNTED, None) != request.id:
            logger.warning("Chord %s is over or has expired; task %s came too late", request.group, request.id)
        elif step == "publish":
            self.publish_body(request.group, maybe_signature(request.chord, app=self.app))

    def _claim(self, part: chords.ChordPart, request: Any) -> chords.ChordStep:
        step: chords.ChordStep = self.ensure(lambda: self.store.claim_chord(part))
        if step == "add":  # there was no result to store the part with
            if self.ensure(lambda: self.store.add_part(part)):
                setattr(request, COUNTED, request.id)
            step = self.ensure(lambda: self.store.claim_chord(part))
        return step

    # -- chords: publish the body --------------------------------------------------------------------------------------

    def publish_body(self, group_id: str, callback: Any) -> None:
        """Publish the body of a claimed chord, or report its failure; and delete the chord with it."""
        try:
            self._publish_or_fail(group_id, callback)
        except chords.ChordOver:
            logger.info("Chord %s was published by another worker", group_id)
        except (StoreError, OperationalError) as error:
            logger.warning("The body of chord %s could not be published and will be retried: %s", group_id, error)
        except Exception as error:
            logger.exception("Chord %s: the body can't be published", group_id)
            failure = _chord_error(f"Callback error: {error!r}", cause=error)
            with self.client.engine.publisher.atomically(self.store.finishing(group_id)):
                self._fail(group_id, callback, failure)

    def _publish_or_fail(self, group_id: str, callback: Any) -> None:
        header = GroupResult.restore(group_id, backend=self, app=self.app)
        with self.client.engine.publisher.atomically(self.store.finishing(group_id)):
            try:
                results = self._join(group_id, header)
            except ChordError as error:
                logger.error("Chord %s raised: %s", group_id, error)  # noqa: TRY400 - the task's traceback is stored
                self._fail(group_id, callback, error)
            else:
                publish_callback(self.app, callback.delay, results)

    def _join(self, group_id: str, header: Any) -> list[Any]:
        """The header's results in its order. Raises ``ChordError``, ``ChordOver``, ``StoreError``.

        ``header``: as it was saved, if there are groups in it.
        """
        parts = self.ensure(lambda: self.store.parts(group_id))
        values = [(each.task_id, self._value(each)) for each in parts]
        if header is None:
            return [value for _, value in values]
        by_id = dict(values)
        return [self._structured(each, by_id) for each in header.results]

    def _value(self, part: chords.ChordPart) -> Any:
        value = self._stored_value(part) if part.payload is None else self.decode(part.payload)
        if part.state in states.EXCEPTION_STATES and not isinstance(value, BaseException):
            value = self.exception_to_python(value)
        if part.state in states.PROPAGATE_STATES:
            raise _chord_error(f"Dependency {part.task_id} raised {value!r}", cause=value)
        return value

    def _stored_value(self, part: chords.ChordPart) -> Any:
        task_id = part.task_id
        record = self.ensure(lambda: self.store.load(task_id))
        if record is None:
            raise ChordError(f"The result of dependency {task_id} was forgotten before the chord was complete")
        return self.decode_result(record.payload)["result"]

    def _structured(self, result: Any, values: dict[str, Any]) -> Any:
        """The results with those of groups inside the header in lists of their own."""
        if isinstance(result, GroupResult):
            return [self._structured(each, values) for each in result.results]
        if result.id in values:
            return values[result.id]
        with allow_join_result():
            return result.get(timeout=self.app.conf.result_chord_join_timeout)

    def _fail(self, group_id: str, callback: Any, error: ChordError) -> None:
        with self._claim_kept(group_id):  # Celery calls error callbacks with three arguments here and now
            self.chord_error_from_stack(callback, error)
        self._fail_outer(callback, error)

    @contextmanager
    def _claim_kept(self, group_id: str) -> Iterator[None]:
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(RENEW_S):
                try:
                    self.store.renew_claim(group_id)
                except KombuFDBError as error:
                    logger.warning("The claim of chord %s could not be renewed: %s", group_id, error)

        thread = threading.Thread(target=renew, name="chord-claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def mark_as_done(self, task_id: str, result: Any, request: Any = None, *options: Any, **named: Any) -> None:
        with _returning(request):
            super().mark_as_done(task_id, result, request, *options, **named)

    def mark_as_failure(
        self, task_id: str, exc: Any, traceback: Any = None, request: Any = None, **options: Any
    ) -> None:
        """Celery fails the rest of the task's chain, but not the members of a group, nor the body of a chord, in it."""
        with _returning(request):
            super().mark_as_failure(task_id, exc, traceback, request, **options)
        self._fail_rest(request, exc)

    def mark_as_revoked(self, task_id: str, reason: str = "", request: Any = None, **options: Any) -> None:
        """Of a revoked task, or one that has expired, Celery does not fail the rest of the chain at all."""
        with _returning(request):
            super().mark_as_revoked(task_id, reason, request, **options)
        self._fail_rest(request, TaskRevokedError(reason))

    def _fail_rest(self, request: Any, error: Exception) -> None:
        """Fail the chords that wait for the rest of the chain."""
        for each in getattr(request, "chain", None) or ():
            self._fail_outer(maybe_signature(each, app=self.app), error)

    def _fail_outer(self, ending: Any, error: Exception) -> None:
        """Fail the chord whose header has a signature that will not run. A part that Celery has failed counts once."""
        options = ending.options
        complex_parts = (
            ending.tasks if isinstance(ending, group) else [ending.body] if isinstance(ending, chord) else []
        )
        for each in (*complex_parts, *(maybe_signature(each, app=self.app) for each in options.get("chain") or ())):
            self._fail_outer(each, error)
        if options.get("chord") and options.get("task_id"):
            # It is a header task of another chord, which would wait for it for ever.
            request = Context(
                id=options["task_id"],
                chord=options["chord"],
                group=options.get("group_id"),
                group_index=options.get("group_index"),
            )
            self.on_chord_part_return(request, states.FAILURE, error)

    def publish_abandoned(self) -> None:
        """Publish the bodies of chords whose last worker died, or could not reach the broker.

        Raises what says that the store does not answer. A chord whose body can't be read delays no other.
        """
        for group_id in self.store.abandoned_chords():
            try:
                self._publish_abandoned(group_id)
            except UNANSWERED:
                raise
            except Exception:
                logger.exception("The body of chord %s can't be published by this worker", group_id)

    def _publish_abandoned(self, group_id: str) -> None:
        body = self.store.chord_body(group_id)
        if body is None:
            logger.error("The body of chord %s can't be published: it can't be encoded as a result", group_id)
        else:
            callback = maybe_signature(self.decode(body), app=self.app)
            if not self._knows(callback) and self._leaves(group_id):
                logger.info("Chord %s was abandoned; its body is left to a worker that knows its task", group_id)
                return
            logger.warning("Chord %s was complete and abandoned; its body is published now", group_id)
            self.publish_body(group_id, callback)

    def _knows(self, signature: Any) -> bool:
        """Whether the app has the tasks. Of another application's it would not know the queue."""
        parts = [*signature.tasks] if isinstance(signature, (group, _chain, chord)) else []
        if isinstance(signature, chord):
            parts.append(signature.body)
        if not parts:
            return signature.task in self.app.tasks
        return all(self._knows(maybe_signature(each, app=self.app)) for each in parts)

    def _leaves(self, group_id: str) -> bool:
        if len(self._left) >= MOST_LEFT:
            self._left.clear()
        now_s = self._clock.monotonic()
        return now_s - self._left.setdefault(group_id, now_s) < LEFT_S

    # -- waiting -----------------------------------------------------------------------------------------------------

    def get_many(
        self,
        task_ids: Iterable[str],
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,
        on_message: Callable[[Any], Any] | None = None,
        on_interval: Callable[[], Any] | None = None,
        max_iterations: int | None = None,
        READY_STATES: frozenset[str] = states.READY_STATES,  # noqa: N803
    ) -> Generator[tuple[str, dict[str, Any]]]:
        """Yield ``(id, meta)`` of each task as it becomes ready.

        ``interval``: how often ``on_interval`` is called, as long as the store answers.

        ``on_message`` is told of each state that is found: one that was replaced at once is not. Raises Celery's
        ``TimeoutError``, as :class:`TimeoutUnanswered` if the store did not answer when it was last asked.
        """
        deadline = None if timeout is None else monotonic() + timeout
        ids = {_text(task_id) for task_id in task_ids}
        cached: dict[str, dict[str, Any]] = {}
        for task_id in ids:
            with suppress(KeyError):  # so raises even ``get``, from Python 3.12 on, if a thread makes room meanwhile
                if (meta := self._cache[task_id])["status"] in READY_STATES:
                    cached[task_id] = meta
        yield from cached.items()
        waiting = Waiting(self._look, ids - cached.keys())
        rounds = 0
        try:
            while waiting.left:
                while changed := waiting.changes(deadline):
                    for task_id, record in changed:
                        meta = self._meta(record)
                        if on_message is not None:
                            on_message(meta)
                        if record.state in READY_STATES:
                            self._cache[task_id] = meta
                            yield task_id, meta
                rounds += 1
                if rounds == max_iterations or not waiting.left:
                    break
                if deadline is not None and monotonic() >= deadline:
                    if waiting.failure is not None:
                        error = waiting.failure
                        raise TimeoutUnanswered(error.text, **error.attributes) from error
                    raise CeleryTimeoutError("The operation timed out.")
                if on_interval is not None and waiting.failure is None:
                    with suppress(Unanswered):  # Celery's looks at the parents of a result: they are repeated
                        on_interval()
                waiting.sleep(deadline, None if on_interval is None else max(interval or 0.5, 0.05))
        finally:
            waiting.close()

    def _look(self, task_ids: Any, timeout_s: float) -> list[Sighting]:
        self._attached(min(timeout_s, self.options.connect_timeout))
        return self.store.look(task_ids, timeout_s=timeout_s)

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,
        on_interval: Callable[[], Any] | None = None,
        on_message: Callable[[Any], Any] | None = None,
    ) -> dict[str, Any]:
        """The meta of one task when it is ready. Raises as :meth:`get_many` does."""
        self._ensure_not_eager()
        with closing(self.get_many([task_id], timeout, interval, no_ack, on_message, on_interval)) as found:
            return next(meta for _, meta in found)

    def wait_for_pending(
        self,
        result: Any,
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,
        on_message: Callable[[Any], Any] | None = None,
        on_interval: Callable[[], Any] | None = None,
        callback: Callable[..., Any] | None = None,
        propagate: bool = True,
    ) -> Any:
        meta = self.wait_for(result.id, timeout, interval, no_ack, on_interval, on_message)
        result._maybe_set_cache(meta)
        if on_interval is not None and meta["status"] in states.PROPAGATE_STATES:
            on_interval()  # raises the error of a parent, such as a header task of a chord, not what follows from it
        return result.maybe_throw(propagate=propagate, callback=callback)

    @property
    def is_async(self) -> bool:
        """Whether a group calls what its ``then`` was given: when all of its results have called theirs."""
        return True

    def iter_native(self, result: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield ``(id, meta)`` of each result as it becomes ready. The result object has it by then.

        What a result object has already is not looked up: an ``EagerResult`` is not in the store.
        """
        self._ensure_not_eager()
        waiting: dict[str, list[AsyncResult]] = defaultdict(list)
        for each in result.results or ():
            if not isinstance(each, AsyncResult):
                yield each.id, each.results
            elif each._cache:
                yield each.id, each._cache
            else:
                waiting[each.id].append(each)
        for task_id, meta in self.get_many(waiting, *args, **kwargs):
            for each in waiting[task_id]:
                each._maybe_set_cache(meta)
            yield task_id, meta

    # -- expiry ------------------------------------------------------------------------------------------------------

    def cleanup(self) -> None:
        """Delete all that has expired. ``celery beat`` has it done each day; workers do it all the time."""
        self.store.sweep()

    def process_cleanup(self) -> None:
        """Celery calls this after each task: now and then sweep one part. Raises nothing."""
        if monotonic() < self._next_s:
            return
        self._next_s = monotonic() + INTERVAL_S * random.uniform(0.8, 1.2)
        try:
            self.store.sweep(parts=1)
        except KombuFDBError as error:
            logger.debug("expired results were not swept: %s", error)

    # -- the sweeper -------------------------------------------------------------------------------------------------

    def _on_ready(self, sender: Any = None, **_: Any) -> None:
        """Start the thread in the main process of a worker of this application, once."""
        if getattr(sender, "app", None) is not self.app or self._sweeper_pid == os.getpid():
            return
        self._sweeper_pid = os.getpid()
        self._stopped = threading.Event()
        threading.Thread(target=self._tend, args=(self._stopped,), name="celery-fdb-sweeper", daemon=True).start()

    def _on_shutdown(self, **_: Any) -> None:
        self._stopped.set()

    def _tend(self, stopped: threading.Event) -> None:
        failing = False
        while not stopped.wait(INTERVAL_S * random.uniform(0.8, 1.2)):
            try:
                self.tend()
                failing = False
            except Exception as error:  # whatever it is, the next look may succeed
                if not failing:
                    unexpected = not isinstance(error, KombuFDBError)
                    logger.warning("the cleanup of the results failed: %s", error, exc_info=unexpected)
                failing = True

    def tend(self) -> None:
        """Publish abandoned chords, and delete what has expired. Raises a ``StoreError``."""
        self.publish_abandoned()
        self.store.sweep(parts=SWEEP_PARTS)


@contextmanager
def _returning(request: Any) -> Iterator[None]:
    """The task has returned: what is stored within is its part of a chord."""
    if request is None:
        yield
        return
    setattr(request, RETURNING, True)
    try:
        yield
    finally:
        setattr(request, RETURNING, False)


def _text(id_: Any) -> str:
    """The text of an id, for a key: users also give a ``uuid.UUID`` or bytes."""
    if not id_:
        raise ValueError(f"an id must not be empty, got {id_!r}")
    return str(bytes_to_str(id_))


def _chord_error(message: str, *, cause: Any) -> ChordError:
    """A chord's error, caused by what a part raised, as in Celery since 5.6. A part's result may be no exception."""
    error = ChordError(message)
    if isinstance(cause, Exception):
        error.__cause__ = cause
    return error


def publish_callback(app: Celery, publish: Callable[..., Any], *args: Any) -> Any:
    """Celery waits between the retries of a callback since 5.7; with an older one it is published as any task."""
    retry = getattr(app.amqp, "_retry_publish", None)
    return publish(*args) if retry is None else retry(publish, *args)
