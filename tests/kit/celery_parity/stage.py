"""All situations at one broker: published, run by real workers, and observed.

No verdict is by time: a situation is over once as much has happened to it as is recorded; only what makes the
recording waits until nothing happens any more. Then the worker is stopped, which gives back what it holds unsettled,
and what is left in the queue and among the dead letters is read. A machine so slow that a task was due while it was to
wait has not played the situation, and tells nothing of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from celery import chain, chord, group
from kombu.entity import Queue

from kit.celery_parity.situations import DELAY_S, SITUATIONS, Situation
from kit.starter import Forked, Starter

__all__ = ["Broker", "Observed", "Stage"]

TESTS = Path(__file__).parents[2]
DEADLINE_S = 120.0
#: For the recording: how long nothing happens.
QUIET_S = 15.0
PROCESSES = 4

#: Of a situation, by the role that a task plays in it: its state, what happened to it how often, what is left of it.
Observed = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Broker:
    """``installed``: with ``celery_fdb.install``."""

    name: str
    url: str
    backend: str
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    installed: bool = False

    @property
    def env(self) -> dict[str, str]:
        return {
            **os.environ,
            "PARITY_BROKER": self.url,
            "PARITY_BACKEND": self.backend,
            "PARITY_FOLDER": str(self.folder),
            "PARITY_OPTIONS": json.dumps(self.options),
            "PARITY_INSTALLED": "yes" if self.installed else "",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            "PYTHONUNBUFFERED": "1",
        }


class Stage:
    """``expected``: what each situation comes to; without, that is to be recorded. ``application``: imported for it."""

    def __init__(
        self,
        broker: Broker,
        starter: Starter,
        application: Any,
        expected: Mapping[str, Observed] | None = None,
    ) -> None:
        self.broker = broker
        self._starter = starter
        self._application = application
        self.app = application.app
        self._expected = expected
        self._workers = 0
        #: What was not played, by name.
        self._missed: set[str] = set()
        #: The ids of tasks that take part, by situation. Some never run.
        self._ids: dict[str, set[str]] = defaultdict(set)

    def play(self) -> dict[str, Observed]:
        """What each situation came to, by its name, that was played."""
        with self.app.connection_for_write() as connection:
            channel = connection.default_channel
            for queue in (*self.app.conf.task_queues, Queue(self._application.DEAD)):
                queue(channel).declare()
        observed: dict[str, Observed] = {}
        endings: dict[str, list[Situation]] = defaultdict(list)
        for situation in SITUATIONS:
            endings[situation.ending].append(situation)
        for ending, situations in endings.items():
            if ending == "fatal":
                for situation in situations:
                    observed.update(self._fatal(situation))
            else:
                observed.update(self._idle(situations) if ending == "idle" else self._ended(ending, situations))
        return {name: came_to for name, came_to in observed.items() if name not in self._missed}

    # -- the worker ends when all is done ------------------------------------------------------------------------------

    def _idle(self, situations: list[Situation]) -> dict[str, Observed]:
        with self._worker() as worker:
            for situation in situations:
                if situation.call in {"revoked_before", "chord_with_a_revoked_member"}:
                    self._revoke(situation.id_of("member2" if "chord" in situation.call else "task"))
                if situation.call == "revoked_by_a_stamp":
                    self.app.control.revoke_by_stamped_headers({"parity": situation.name}, reply=True)
                begun = time.monotonic()
                self.call(situation)
                if situation.call == "revoked_while_it_waits":
                    self._revoke(situation.id_of())
                    self._has_waited([situation], begun)
                elif situation.call in {"terminated", "killed"}:
                    self._until(partial(self._has, situation, "run"))
                    number = "SIGTERM" if situation.call == "terminated" else "SIGKILL"
                    self._revoke(situation.id_of(), terminate=True, signal=number)
            self._settle(situations)
            worker.end(signal.SIGTERM)
        return self._observed(situations)

    def _revoke(self, task_id: str, **options: Any) -> None:
        assert self.app.control.revoke(task_id, reply=True, timeout=DEADLINE_S, limit=1, **options)

    # -- the worker may end by itself ---------------------------------------------------------------------------------

    def _fatal(self, situation: Situation) -> dict[str, Observed]:
        with self._worker() as worker:
            self.call(situation)
            self._settle([situation], worker)
            exit_code = worker.process.poll()
            if exit_code is None:
                worker.end(signal.SIGTERM)
        observed = self._observed([situation])
        state = "goes on" if exit_code is None else f"ends with {exit_code}"
        observed[situation.name]["worker"] = {"state": state, "events": {}}
        return observed

    # -- the worker ends meanwhile -------------------------------------------------------------------------------------

    def _ended(self, ending: str, situations: list[Situation]) -> dict[str, Observed]:
        """Each process of the worker has one to do, and others wait for one, or for their time."""
        held = [each for each in situations if each.behaviour == "hold"]
        timed = [each for each in situations if each.behaviour == "retry_later" or each.call == "delayed"]
        with self._worker() as worker:
            begun = time.monotonic()
            for situation in timed:
                self.call(situation)
            self._until(lambda: all(self._has(each, "retry") for each in timed if each.behaviour == "retry_later"))
            for situation in held:
                self.call(situation)
            self._until(lambda: all(self._has(each, "run") for each in held))
            waiting = [each for each in situations if each not in timed and each not in held]
            for situation in waiting:
                self.call(situation)
            self._until(lambda: all(self._began(each) for each in waiting))
            self._end(ending, worker, held)
        self._has_waited(timed, begun)
        if ending == "lost":
            self._restore()
        for situation in held:
            self._allow(situation)
        with self._worker() as worker:
            self._settle(situations)
            worker.end(signal.SIGTERM)
        return self._observed(situations)

    def _has_waited(self, situations: list[Situation], begun: float) -> None:
        if time.monotonic() - begun >= DELAY_S:
            self._missed.update(each.name for each in situations)

    def _end(self, ending: str, worker: Worker, held: list[Situation]) -> None:
        if ending == "lost":
            worker.kill()
        elif ending == "cold":
            worker.end(signal.SIGQUIT)
        else:
            before = self._events()["worker"]["shutting down"]
            worker.process.send_signal(signal.SIGTERM)
            self._until(lambda: self._events()["worker"]["shutting down"] > before)
            for situation in held:
                self._allow(situation)
            worker.wait()

    def _restore(self) -> None:
        """On Redis a dead worker's messages come back by a timer alone, at which workers look every 100 s."""
        if not self.broker.url.startswith("redis"):
            return
        with self.app.connection_for_read() as connection:
            channel = connection.default_channel
            look, held = channel.qos.restore_visible, channel.unacked_index_key
            self._until(lambda: look(interval=1) or not channel.client.zcard(held))

    def _allow(self, situation: Situation) -> None:
        (self.broker.folder / f"allow-{situation.id_of()}").touch()

    def _began(self, situation: Situation) -> bool:
        roles = ("member1", "member2") if situation.call == "chord" else ("task",)
        return all(self._has(situation, "received", role) for role in roles)

    # -- how a situation is called -------------------------------------------------------------------------------------

    def call(self, situation: Situation) -> None:
        getattr(self, f"_call_{situation.call}")(situation)

    def _the(self, situation: Situation, role: str, task: str | None = None) -> Any:
        self._ids[situation.name].add(situation.id_of(role))
        return self.app.signature(task or situation.task, task_id=situation.id_of(role))

    def _call_plain(self, situation: Situation, **options: Any) -> None:
        self._the(situation, "task").apply_async(**options)

    _call_terminated = _call_killed = _call_revoked_before = _call_plain

    def _call_expired(self, situation: Situation) -> None:
        self._call_plain(situation, expires=datetime.now(UTC) - timedelta(seconds=1))

    def _call_delayed(self, situation: Situation) -> None:
        self._call_plain(situation, countdown=DELAY_S)

    _call_revoked_while_it_waits = _call_delayed

    def _call_delayed_past_its_expiry(self, situation: Situation) -> None:
        self._call_plain(situation, countdown=2, expires=1)

    def _call_revoked_by_a_stamp(self, situation: Situation) -> None:
        signature = self._the(situation, "task")
        signature.stamp(parity=situation.name)
        signature.apply_async()

    def _call_unknown(self, situation: Situation) -> None:
        self._the(situation, "task", "no such task").apply_async()

    def _call_link(self, situation: Situation) -> None:
        self._call_plain(situation, link=self._the(situation, "link", "ok early"))

    def _call_link_error(self, situation: Situation) -> None:
        self._call_plain(situation, link_error=self._errback(situation))

    def _errback(self, situation: Situation) -> Any:
        return self._the(situation, "errback", "errback")

    def _call_link_error_inline(self, situation: Situation) -> None:
        self._call_plain(situation, link_error=self.app.signature("inline errback"))

    def _call_chain(self, situation: Situation) -> None:
        steps = ("first", "ok early"), ("task", situation.task), ("last", "ok early")
        chain(*(self._the(situation, *step) for step in steps), app=self.app).apply_async(
            link_error=self._errback(situation)
        )

    def _group(self, situation: Situation, role: str = "member", first: str = "ok early") -> Any:
        """Two of them: one of the situation's tasks."""
        members = [self._the(situation, f"{role}1", first), self._the(situation, f"{role}2")]
        return group(members, app=self.app)

    def _oks(self, situation: Situation, role: str) -> Any:
        return group([self._the(situation, f"{role}{number}", "ok early") for number in (1, 2)], app=self.app)

    def _call_group(self, situation: Situation) -> None:
        self._group(situation).apply_async()

    def _chord(self, situation: Situation, header: Any, body: Any = None) -> Any:
        return chord(header, body or self._the(situation, "body", "ok early"), app=self.app)

    def _call_chord(self, situation: Situation) -> None:
        made = self._chord(situation, self._group(situation))
        made.body.link_error(self._errback(situation))
        made.apply_async()

    _call_chord_with_a_revoked_member = _call_chord

    def _call_chord_with_an_expired_member(self, situation: Situation) -> None:
        members = self._group(situation)
        members.tasks[1].set(expires=datetime.now(UTC) - timedelta(seconds=1))
        self._chord(situation, members).apply_async()

    def _call_chord_into(self, situation: Situation) -> None:
        body = self._the(situation, "body")
        body.link_error(self._errback(situation))
        self._chord(situation, self._oks(situation, "member"), body).apply_async()

    def _call_chord_into_a_group(self, situation: Situation) -> None:
        self._chord(situation, self._group(situation), self._oks(situation, "body")).apply_async()

    def _call_chord_of_chains(self, situation: Situation) -> None:
        chains = [
            chain(self._the(situation, f"{n}first", situation.task), self._the(situation, f"{n}last", "ok early"))
            for n in (1, 2)
        ]
        self._chord(situation, chains).apply_async()

    def _call_chord_of_chords(self, situation: Situation) -> None:
        inner = self._chord(situation, self._group(situation, "inner"), self._the(situation, "innerbody", "ok early"))
        self._chord(situation, [inner, self._the(situation, "member", "ok early")]).apply_async()

    def _call_chord_of_chords_into_groups(self, situation: Situation) -> None:
        inner = self._chord(situation, self._group(situation, "inner"), self._oks(situation, "innerbody"))
        self._chord(situation, [inner, self._the(situation, "member", "ok early")]).apply_async()

    def _call_chord_of_chains_into_groups(self, situation: Situation) -> None:
        inner = chain(self._the(situation, "first"), self._oks(situation, "end"), app=self.app)
        self._chord(situation, [inner, self._the(situation, "member", "ok early")]).apply_async()

    def _call_chord_of_chains_from_groups_into_groups(self, situation: Situation) -> None:
        inner = chain(self._group(situation, "start"), self._oks(situation, "end"), app=self.app)
        self._chord(situation, [inner, self._the(situation, "member", "ok early")]).apply_async()

    def _call_chord_of_groups(self, situation: Situation) -> None:
        inner = self._group(situation, "inner")
        self._chord(situation, [inner, self._the(situation, "member", "ok early")]).apply_async()

    def _call_chain_with_a_chord(self, situation: Situation) -> None:
        first, last = (self._the(situation, role, "ok early") for role in ("first", "last"))
        steps = chain(first, self._group(situation), last, app=self.app)
        steps.apply_async(link_error=self._errback(situation))

    # -- what came of it -----------------------------------------------------------------------------------------------

    def _events(self) -> dict[str, Counter[str]]:
        """What happened so far, how often, by the task's id."""
        events: dict[str, Counter[str]] = defaultdict(Counter)
        try:
            lines = (self.broker.folder / "events").read_text().splitlines()
        except FileNotFoundError:
            return events
        for line in lines:
            task_id, event = json.loads(line)
            events[task_id][event] += 1
        return events

    def _has(self, situation: Situation, event: str, role: str = "task") -> bool:
        return bool(self._events()[situation.id_of(role)][event])

    def _settle(self, situations: list[Situation], worker: Worker | None = None) -> None:
        """``worker``: one that may end by itself."""
        if self._expected is None:
            self._until_quiet()
            return
        left = list(situations)
        deadline = time.monotonic() + DEADLINE_S

        def over() -> bool:
            """What is not over in time is observed as it is."""
            events = self._events()
            left[:] = [
                each for each in left if each.name not in self._missed and not self._came_to(each, events, worker)
            ]
            return not left or time.monotonic() > deadline

        self._until(over, DEADLINE_S + 1)

    def _came_to(self, situation: Situation, events: Mapping[str, Counter[str]], worker: Worker | None) -> bool:
        assert self._expected is not None
        expected = self._expected[situation.name]
        return all(self._role_came_to(situation, role, facts, events, worker) for role, facts in expected.items())

    def _role_came_to(
        self, situation: Situation, role: str, facts: Any, events: Mapping[str, Counter[str]], worker: Worker | None
    ) -> bool:
        if role == "worker":
            return worker is None or facts["state"] == "goes on" or worker.process.poll() is not None
        task_id = situation.id_of(role)
        happened = events.get(task_id, Counter())
        return all(happened[event] >= number for event, number in facts["events"].items()) and (
            self._state(task_id) == facts["state"]
        )

    def _until_quiet(self) -> None:
        seen, since = 0, time.monotonic()
        while time.monotonic() - since < QUIET_S:
            if (size := (self.broker.folder / "events").stat().st_size) != seen:
                seen, since = size, time.monotonic()
            time.sleep(0.1)

    def _until(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{self.broker.name}: waited in vain"
            time.sleep(0.02)

    def _state(self, task_id: str) -> str:
        result = self.app.AsyncResult(task_id)
        value = result.result
        if result.state == "STARTED":  # with the process
            return "STARTED"
        told = type(value).__name__ if isinstance(value, BaseException) else json.dumps(value)
        return f"{result.state} {told}"

    def _observed(self, situations: list[Situation]) -> dict[str, Observed]:
        events, left, dead = self._events(), self._left(), self._drained(self._application.DEAD)
        observed: dict[str, Observed] = {each.name: {} for each in situations}
        taking_part = {task_id for situation in situations for task_id in self._ids[situation.name]}
        for task_id in {*taking_part, *events, *left, *dead}:
            name, _, role = task_id.partition(".")
            if name in observed:
                facts: dict[str, Any] = {"state": self._state(task_id), "events": dict(sorted(events[task_id].items()))}
                facts |= {"left": left[task_id]} if left[task_id] else {}
                facts |= {"dead": dead[task_id]} if dead[task_id] else {}
                observed[name][role] = facts
        return {name: dict(sorted(roles.items())) for name, roles in observed.items()}

    def _left(self) -> Counter[str]:
        """Delayed ones, too, which wait in the store with us."""
        found = self._drained(self._application.QUEUE)
        if self.broker.url.startswith("fdb"):
            from kombu_fdb import Broker as Ours

            with Ours.open(self.broker.url) as ours:
                queue = ours.queue(self._application.QUEUE)
                found.update(each.task_id for state in ("delayed", "leased") for each in queue.each(state))
        return found

    def _drained(self, queue: str) -> Counter[str]:
        """By the ids of tasks. It also empties it for those that come next."""
        found: Counter[str] = Counter()
        with self.app.connection_for_read() as connection:
            channel = connection.default_channel
            while (message := channel.basic_get(queue)) is not None:
                found[message.headers["id"]] += 1
                channel.basic_ack(message.delivery_tag)
        return found

    # -- workers -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        self._workers += 1
        worker = Worker(self.broker, self._starter, f"w{self._workers}")
        try:
            self._until(worker.is_ready)
            yield worker
        finally:
            worker.kill()


class Worker:
    def __init__(self, broker: Broker, starter: Starter, name: str) -> None:
        self._log = broker.folder / f"{broker.name}-{name}.log"
        arguments = ["-A", "kit.celery_parity.application", "worker", "-n", f"{name}@parity", "-c", str(PROCESSES)]
        with self._log.open("w") as output:
            arguments += ["-l", "INFO", "--without-mingle", "--without-gossip"]
            self.process: Forked = starter.start(arguments, broker.env, broker.folder, output)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        return "ready." in self._log.read_text()

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.wait()

    def wait(self) -> None:
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker did not end:\n{self._log.read_text()[-5000:]}") from None

    def kill(self) -> None:
        """All of its processes at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
