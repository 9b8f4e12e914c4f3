"""Chords, as Celery calls them: open, count, publish the body. The guarantees and the model are in ``chords.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from celery import Celery, states
from celery.app.task import Context
from celery.backends.base import BaseBackend
from celery.canvas import chord, group, maybe_signature
from celery.exceptions import ChordError
from celery.result import GroupResult, allow_join_result
from celery.utils.functional import _regen
from celery.utils.log import get_logger
from kombu.exceptions import EncodeError, OperationalError

from celery_fdb.results.chords import CLAIM_MS, ChordOver, ChordStep, Return
from celery_fdb.results.store import ResultStore
from kombu_fdb.errors import KombuFDBError, StoreError

logger = get_logger(__name__)

#: An attribute of a task's request: the task's id, once its part was counted.
COUNTED = "fdb_part_counted"
#: Between two renewals of a claim, in seconds.
RENEW_S = CLAIM_MS / 3000


class ChordSupport(BaseBackend):
    """The part of the backend that does chords. How results are kept, and encoded, its subclass says."""

    @property
    def store(self) -> ResultStore:
        raise NotImplementedError

    # -- open --------------------------------------------------------------------------------------------------------

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        """Before the header is published. Forgets an earlier run of the same frozen chord."""
        group_id, results = header_result_args[:2]
        expires_ms = self._moment(self.chord_expires)
        try:
            payload = self._encode_checked(body)
        except (EncodeError, TypeError):  # only the tasks' serializer can: then only a task of the header publishes it
            payload = None
        self.store.open_chord(group_id, payload, expires_ms)
        # A generator is not looked at: its tasks are made while they are published.
        if not isinstance(results, _regen) and any(isinstance(each, GroupResult) for each in results):
            # Groups inside of the header: their structure is needed when it is joined.
            saved = self._encode_checked({"result": self.app.GroupResult(*header_result_args).as_tuple()})
            self.store.save_group(group_id, saved, expires_ms)

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Before the last header task is published."""
        self.store.enlarge_chord(group_id, size=chord_size)

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """``self.add_to_chord(signature)`` in a header task."""
        self.store.enlarge_chord(chord_id, joined=result.id)

    # -- count -------------------------------------------------------------------------------------------------------

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """A header task has returned; its part stands in the store already if its result does."""
        returned = self._returned(request, request.id, state, self.encode_result(result, state))
        if returned is None:
            return
        step = self._claim(returned, request)
        # A part that was counted may find that another one, which came after it, has published the body.
        if step is ChordStep.LATE and getattr(request, COUNTED, None) != request.id:
            logger.warning("Chord %s is over or has expired; task %s came too late", request.group, request.id)
        elif step is ChordStep.PUBLISH:
            self.publish_body(request.group, maybe_signature(request.chord, app=self.app))

    def _claim(self, returned: Return, request: Any) -> ChordStep:
        step: ChordStep = self.ensure(lambda: self.store.claim_chord(returned.part))
        if step is ChordStep.ADD:  # there was no result to store it with
            if self.ensure(lambda: self.store.add_part(returned)):
                setattr(request, COUNTED, request.id)
            step = self.ensure(lambda: self.store.claim_chord(returned.part))
        return step

    # -- publish -----------------------------------------------------------------------------------------------------

    def publish_body(self, group_id: str, callback: Any) -> None:
        """Publish the body of a claimed chord, or report its failure; and delete the chord with it."""
        try:
            self._publish_or_fail(group_id, callback)
        except ChordOver:
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
        values = [(each.part.task_id, self._value(each)) for each in parts]
        if header is None:
            return [value for _, value in values]
        by_id = dict(values)
        return [self._structured(each, by_id) for each in header.results]

    def _value(self, returned: Return) -> Any:
        value = self._stored_value(returned) if returned.payload is None else self.decode(returned.payload)
        if returned.state in states.EXCEPTION_STATES and not isinstance(value, BaseException):
            value = self.exception_to_python(value)
        if returned.state in states.PROPAGATE_STATES:
            raise _chord_error(f"Dependency {returned.part.task_id} raised {value!r}", cause=value)
        return value

    def _stored_value(self, returned: Return) -> Any:
        task_id = returned.part.task_id
        record = self.ensure(lambda: self.store.load(task_id))
        if record is None:
            raise ChordError(f"The result of dependency {task_id} was forgotten before the chord was complete")
        return self.decode_result(record.payload)["result"]

    def _structured(self, result: Any, values: dict[str, Any]) -> Any:
        """Groups inside of the header, in lists of their own."""
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
        ended = Event()

        def renew() -> None:
            while not ended.wait(RENEW_S):
                try:
                    self.store.renew_claim(group_id)
                except KombuFDBError as error:
                    logger.warning("The claim of chord %s could not be renewed: %s", group_id, error)

        thread = Thread(target=renew, name="chord-claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def mark_as_failure(
        self, task_id: str, exc: Any, traceback: Any = None, request: Any = None, **options: Any
    ) -> None:
        """Celery fails the rest of the task's chain, but not the members of a group, nor the body of a chord, in it."""
        super().mark_as_failure(task_id, exc, traceback, request, **options)
        for each in getattr(request, "chain", None) or ():
            self._fail_outer(maybe_signature(each, app=self.app), exc)

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
        """Publish the bodies of chords whose last worker died, or could not reach the broker."""
        for group_id in self.store.abandoned_chords():
            body = self.store.chord_body(group_id)
            if body is None:
                logger.error("The body of chord %s can't be published: it can't be encoded as a result", group_id)
            else:
                logger.warning("Chord %s was complete and abandoned; its body is published now", group_id)
                self.publish_body(group_id, maybe_signature(self.decode(body), app=self.app))


def _chord_error(message: str, *, cause: Any) -> ChordError:
    """With what a part raised as its cause, as in Celery since 5.6. A part's result may be something else."""
    error = ChordError(message)
    if isinstance(cause, Exception):
        error.__cause__ = cause
    return error


def publish_callback(app: Celery, publish: Callable[..., Any], *args: Any) -> Any:
    """Celery waits between the retries of a callback since 5.7; with an older one it is published as any task."""
    retry = getattr(app.amqp, "_retry_publish", None)
    return publish(*args) if retry is None else retry(publish, *args)
