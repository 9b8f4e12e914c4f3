"""Which verb of the engine a step has come to, where one step does several things."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kit.simulation.process import Frame
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.facade.messages import Messages
from kombu_fdb.engine.messages.claim import Served
from kombu_fdb.engine.scheduling.wait_queue import Standing
from kombu_fdb.model import Delivery


class ConnectedMessages(Messages):
    """The real ones; each verb of a thread of the connection is a frame of its own within the step."""

    def __init__(self, engine: Engine, frames: list[Frame]) -> None:
        super().__init__(engine.transactions, engine.inspect)
        self.frames = frames

    def claim(self, *args: Any, **given: Any) -> list[Delivery]:
        with self._in("claim"):
            return super().claim(*args, **given)

    def join(self, *args: Any, **given: Any) -> None:
        with self._in("ack"):
            super().join(*args, **given)

    def serve(self, *args: Any, **given: Any) -> Served:
        with self._in("serve"):
            return super().serve(*args, **given)

    def look(self, *args: Any, **given: Any) -> tuple[Standing, list[Delivery]]:
        with self._in("reject"):
            return super().look(*args, **given)

    def ack(self, *args: Any, **given: Any) -> list[bool]:
        with self._in("ack"):
            return super().ack(*args, **given)

    def reject(self, *args: Any, **given: Any) -> list[bool]:
        with self._in("reject"):
            return super().reject(*args, **given)

    def release(self, *args: Any, counted: bool = True, **given: Any) -> list[bool]:
        with self._in("release", counted=counted):
            return super().release(*args, counted=counted, **given)

    @contextmanager
    def _in(self, verb: str, *, counted: bool = True) -> Iterator[None]:
        outer = self.frames[-1]
        inner = replace(outer, verb=verb, counted=counted, is_verb=True)
        self.frames.append(inner)
        try:
            yield
        finally:
            self.frames.pop()
            for number in ("begins", "reads", "commits", "answered", "operations"):
                setattr(outer, number, getattr(inner, number))
