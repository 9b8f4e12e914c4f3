"""A job in the hands of a task."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Self

from kombu_fdb.aio.calls import Face
from kombu_fdb.api import job as sync
from kombu_fdb.model import Death

__all__ = ["Job"]


class Job(Face[sync.Job]):
    """Get it from ``take``. Settle it once: ``async with job:``, or one of its verbs (``api/job.py``).

    A settlement that was asked for is done, also if the task is cancelled while it waits for it.
    """

    @property
    def id(self) -> bytes:
        """16 bytes, as ``put`` returned them; the same in every attempt."""
        return self._sync.id

    @property
    def queue(self) -> str:
        return self._sync.queue

    @property
    def payload(self) -> bytes:
        return self._sync.payload

    @property
    def key(self) -> str:
        """Whose job it is, for fair scheduling; "" for none."""
        return self._sync.key

    @property
    def attempts(self) -> int:
        """Which attempt this is, from 1. Being released unstarted does not count."""
        return self._sync.attempts

    @property
    def deaths(self) -> tuple[Death, ...]:
        """Its history as a dead letter, the newest first."""
        return self._sync.deaths

    @property
    def ttr(self) -> float | None:
        """Seconds it may take; None for any time."""
        return self._sync.ttr

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As ``with`` of a sync job."""
        await self._calls.finish(partial(self._sync.__exit__, kind, error, traceback))

    async def ack(self) -> None:
        """Done: delete it. Raises ``LeaseLost``, ``AlreadySettled``, or a ``StoreError``: try again."""
        await self._calls.finish(self._sync.ack)

    async def release(self, delay: float = 0, *, backoff: str | None = None, error: object = None) -> None:
        """Hand it back: to its old position, or not before ``delay`` seconds, or a ``backoff``, have passed.

        Raises as :meth:`ack`.
        """
        await self._calls.finish(partial(self._sync.release, delay, backoff=backoff, error=error))

    async def bury(self, *, error: object = None) -> None:
        """Make it a dead letter, with ``error`` in its history. Raises as :meth:`ack`."""
        await self._calls.finish(partial(self._sync.bury, error=error))

    async def extend(self) -> None:
        """Check that it is still held, and begin its time to run anew. Raises ``LeaseLost``, ``AlreadySettled``."""
        await self._calls.finish(self._sync.extend)
