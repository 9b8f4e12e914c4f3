"""All situations at one broker: published, run by real workers, and observed.

They are played in scenes, each with workers and a queue of its own. A scene is a generator that yields what it waits
for, so a few of them go on side by side in one thread. No verdict is by time: a situation is over once as much has
happened to it as is recorded; only what makes the recording waits until nothing happens any more. Then the worker is
stopped, which gives back what it holds unsettled, and what is left in the queues and among the dead letters is read. A
machine so slow that a task was due while it was to wait has not played the situation, and tells nothing of it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from celery import chain, chord, group
from kombu.utils.json import loads

from kit.celery_parity.situations import DELAY_S, SITUATIONS, Situation
from kit.starter import Forked, Starter

TESTS = Path(__file__).parents[2]
DEADLINE_S = 120.0
#: For the recording: how long nothing happens.
QUIET_S = 15.0
PROCESSES = 4
#: Scenes at once: with more, a small machine is so slow that tasks are due before their worker has ended.
SIDE_BY_SIDE = 4

#: Of a situation, by the role that a task plays in it: its state, what happened to it how often, what is left of it.
Observed = dict[str, dict[str, Any]]
#: A scene, which yields what it waits for.
Scene = Generator[Callable[[], bool]]


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
        """Of the stage; a worker's has the name of its queue as well."""
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
        self._events = Events(broker.folder / "events")
        #: Where what is called now goes.
        self._queue = ""
        #: How its worker has ended by itself, or that it has not, by the situation's name.
        self._fates: dict[str, str] = {}
        #: What was not played, by name.
        self._missed: set[str] = set()
        #: The ids of tasks that take part, by situation. Some never run.
        self._ids: dict[str, set[str]] = defaultdict(set)

    def play(self) -> dict[str, Observed]:
        """What each situation came to, by its name, that was played."""
        self.app.conf.task_routes = [lambda *_, **__: {"queue": self._queue}]
        with self.app.connection_for_write() as connection:
            for queue in self.app.conf.task_queues:
                queue(connection.default_channel).declare()
        scenes: dict[str, list[Situation]] = defaultdict(list)
        for situation in SITUATIONS:
            scenes[situation.scene].append(situation)
        with ExitStack() as workers:
            self._side_by_side(self._scene(situations, workers) for situations in scenes.values())
        return self._observed()

    def _side_by_side(self, scenes: Iterable[Scene]) -> None:
        """All scenes, ``SIDE_BY_SIDE`` at once."""
        coming = iter(scenes)
        waits: dict[Scene, tuple[Callable[[], bool], float]] = {}
        while True:
            while len(waits) < SIDE_BY_SIDE and (scene := next(coming, None)) is not None:
                waits[scene] = (lambda: True), 0
            if not waits:
                return
            self._events.read()
            for scene, (is_over, deadline) in list(waits.items()):
                if is_over():
                    del waits[scene]
                    if (condition := next(scene, None)) is not None:
                        waits[scene] = condition, time.monotonic() + 2 * DEADLINE_S
                else:
                    assert time.monotonic() < deadline, f"{self.broker.name}: {scene} waited in vain"
            time.sleep(0.01)

    def _scene(self, situations: list[Situation], workers: ExitStack) -> Scene:
        ending = situations[0].ending
        if ending == "idle":
            yield from self._idle(situations, workers)
        elif ending == "fatal":
            yield from self._fatal(situations, workers)
        else:
            yield from self._ended(ending, situations, workers)

    def _start(self, situations: list[Situation], workers: ExitStack) -> Worker:
        self._workers += 1
        worker = Worker(self.broker, self._starter, f"w{self._workers}", situations[0].scene)
        workers.callback(worker.kill)
        return worker

    # -- the worker ends when all is done ------------------------------------------------------------------------------

    def _idle(self, situations: list[Situation], workers: ExitStack) -> Scene:
        worker = self._start(situations, workers)
        yield worker.is_ready
        for situation in situations:
            if situation.call in {"revoked_before", "chord_with_a_revoked_member"}:
                self._revoke(worker, situation.id_of("member2" if "chord" in situation.call else "task"))
            if situation.call == "revoked_by_a_stamp":
                self.app.control.revoke_by_stamped_headers({"parity": situation.name})
                self._answers(worker)
            begun = time.monotonic()
            self.call(situation)
            if situation.call == "revoked_while_it_waits":
                self._revoke(worker, situation.id_of())
                self._has_waited([situation], begun)
        for situation in situations:
            if situation.call in {"terminated", "killed"}:
                yield self._has([situation], "run")
                number = "SIGTERM" if situation.call == "terminated" else "SIGKILL"
                self._revoke(worker, situation.id_of(), terminate=True, signal=number)
        yield self._settled(situations)
        worker.send_signal(signal.SIGTERM)
        yield worker.has_ended

    def _revoke(self, worker: Worker, task_id: str, **options: Any) -> None:
        """To all workers, as an application does; this one has done it when it answers what came after it."""
        self.app.control.revoke(task_id, **options)
        self._answers(worker)

    def _answers(self, worker: Worker) -> None:
        assert self.app.control.ping([worker.address], timeout=DEADLINE_S, limit=1)

    # -- the worker may end by itself ---------------------------------------------------------------------------------

    def _fatal(self, situations: list[Situation], workers: ExitStack) -> Scene:
        [situation] = situations
        worker = self._start(situations, workers)
        yield worker.is_ready
        self.call(situation)
        yield self._settled(situations, worker)
        exit_code = worker.process.poll()
        self._fates[situation.name] = "goes on" if exit_code is None else f"ends with {exit_code}"
        worker.send_signal(signal.SIGTERM)
        yield worker.has_ended

    # -- the worker ends meanwhile -------------------------------------------------------------------------------------

    def _ended(self, ending: str, situations: list[Situation], workers: ExitStack) -> Scene:
        """Each process of the worker has one to do, and others wait for one, or for their time."""
        held = [each for each in situations if each.behaviour == "hold"]
        timed = [each for each in situations if each.behaviour == "retry_later" or each.call == "delayed"]
        waiting = [each for each in situations if each not in timed and each not in held]
        worker = self._start(situations, workers)
        yield worker.is_ready
        begun = time.monotonic()
        for situation in timed:
            self.call(situation)
        yield self._has([each for each in timed if each.behaviour == "retry_later"], "retry")
        for situation in held:
            self.call(situation)
        yield self._has(held, "run")
        for situation in waiting:
            self.call(situation)
        yield self._has(waiting, "received")
        worker.send_signal({"warm": signal.SIGTERM, "cold": signal.SIGQUIT, "lost": signal.SIGKILL}[ending])
        if ending == "warm":
            yield lambda: bool(self._events.of[worker.address]["shutting down"])
            self._allow(held)
        yield worker.has_ended
        self._has_waited(timed, begun)
        if ending == "lost":
            self._restore(situations[0].scene)
        self._allow(held)
        worker = self._start(situations, workers)
        yield worker.is_ready
        yield self._settled(situations)
        worker.send_signal(signal.SIGTERM)
        yield worker.has_ended

    def _has_waited(self, situations: list[Situation], begun: float) -> None:
        if time.monotonic() - begun >= DELAY_S:
            self._missed.update(each.name for each in situations)

    def _restore(self, queue: str) -> None:
        """What a dead worker held. On Redis it comes back by a timer alone: an hour later, at workers' next look."""
        if not self.broker.url.startswith("redis"):
            return
        with self.app.connection_for_read() as connection:
            channel = connection.default_channel
            for tag, held in channel.client.hgetall(channel.unacked_key).items():
                if loads(held)[2] == queue:
                    channel.qos.restore_by_tag(tag)

    def _allow(self, situations: list[Situation]) -> None:
        for situation in situations:
            (self.broker.folder / f"allow-{situation.id_of()}").touch()

    # -- how a situation is called -------------------------------------------------------------------------------------

    def call(self, situation: Situation) -> None:
        self._queue = situation.scene
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
        """A worker that does not survive has no time for it, or just enough: so it stays in a queue."""
        errback = self._the(situation, "errback", "errback")
        return errback.set(queue=self._application.ASIDE) if situation.ending == "fatal" else errback

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

    def _has(self, situations: list[Situation], event: str) -> Callable[[], bool]:
        """Whether it has happened to all."""
        ids = {
            each.id_of(role)
            for each in situations
            for role in (("member1", "member2") if each.call == "chord" else ("task",))
        }
        return lambda: all(self._events.of[task_id][event] for task_id in ids)

    def _settled(self, situations: list[Situation], worker: Worker | None = None) -> Callable[[], bool]:
        """``worker``: one that may end by itself."""
        if self._expected is None:
            begun = time.monotonic()
            return lambda: time.monotonic() - max(begun, self._events.latest) > QUIET_S
        left = list(situations)
        deadline = time.monotonic() + DEADLINE_S

        def is_over() -> bool:
            """What is not over in time is observed as it is."""
            left[:] = [each for each in left if each.name not in self._missed and not self._came_to(each, worker)]
            return not left or time.monotonic() > deadline

        return is_over

    def _came_to(self, situation: Situation, worker: Worker | None) -> bool:
        assert self._expected is not None
        expected = self._expected[situation.name]
        return all(self._role_came_to(situation, role, facts, worker) for role, facts in expected.items())

    def _role_came_to(self, situation: Situation, role: str, facts: Any, worker: Worker | None) -> bool:
        if role == "worker":
            return worker is None or facts["state"] == "goes on" or worker.process.poll() is not None
        task_id = situation.id_of(role)
        happened = self._events.of[task_id]
        return all(happened[event] >= number for event, number in facts["events"].items()) and (
            self._state(task_id) == facts["state"]
        )

    def _state(self, task_id: str) -> str:
        result = self.app.AsyncResult(task_id)
        value = result.result
        if result.state == "STARTED":  # with the process
            return "STARTED"
        told = type(value).__name__ if isinstance(value, BaseException) else json.dumps(value)
        return f"{result.state} {told}"

    def _observed(self) -> dict[str, Observed]:
        """When all workers have ended."""
        self._events.read()
        left, dead = self._left(), self._drained(self._application.DEAD)
        played = [each for each in SITUATIONS if each.name not in self._missed]
        observed: dict[str, Observed] = {each.name: {} for each in played}
        for name, fate in self._fates.items():
            observed[name]["worker"] = {"state": fate, "events": {}}
        taking_part = {task_id for ids in self._ids.values() for task_id in ids}
        for task_id in {*taking_part, *self._events.of, *left, *dead}:
            name, _, role = task_id.partition(".")
            if name in observed:
                happened = self._events.of[task_id]
                facts: dict[str, Any] = {"state": self._state(task_id), "events": dict(sorted(happened.items()))}
                facts |= {"left": left[task_id]} if left[task_id] else {}
                facts |= {"dead": dead[task_id]} if dead[task_id] else {}
                observed[name][role] = facts
        return {name: dict(sorted(roles.items())) for name, roles in observed.items()}

    def _left(self) -> Counter[str]:
        """Delayed ones, too, which wait in the store with us."""
        queues = [each.name for each in self.app.conf.task_queues if each.name != self._application.DEAD]
        found: Counter[str] = Counter()
        for queue in queues:
            found.update(self._drained(queue))
        if self.broker.url.startswith("fdb"):
            from kombu_fdb import Broker as Ours

            with Ours.open(self.broker.url) as ours:
                for queue in queues:
                    for state in ("delayed", "leased"):
                        found.update(each.task_id for each in ours.queue(queue).each(state))
        return found

    def _drained(self, queue: str) -> Counter[str]:
        """By the ids of tasks."""
        found: Counter[str] = Counter()
        with self.app.connection_for_read() as connection:
            channel = connection.default_channel
            while (message := channel.basic_get(queue)) is not None:
                found[message.headers["id"]] += 1
                channel.basic_ack(message.delivery_tag)
        return found


class Events:
    """What workers have noted."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self._read_bytes = 0
        #: How often each has happened, by the task's id.
        self.of: dict[str, Counter[str]] = defaultdict(Counter)
        #: When the latest one was read.
        self.latest = time.monotonic()

    def read(self) -> None:
        """A line that lies in two pages of the file can be seen in part: it is read when it is whole."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            *whole, _ = file.read().split(b"\n")
        for line in whole:
            self._read_bytes += len(line) + 1
            task_id, event = json.loads(line)
            self.of[task_id][event] += 1
            self.latest = time.monotonic()


class Worker:
    def __init__(self, broker: Broker, starter: Starter, name: str, queue: str) -> None:
        self._log = broker.folder / f"{broker.name}-{name}.log"
        self.address = f"{name}@parity"
        arguments = ["-A", "kit.celery_parity.application", "worker", "-n", self.address, "-c", str(PROCESSES)]
        with self._log.open("w") as output:
            arguments += ["-Q", queue, "-l", "INFO", "--without-mingle", "--without-gossip"]
            env = {**broker.env, "PARITY_QUEUE": queue}
            self.process: Forked = starter.start(arguments, env, broker.folder, output)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        return "ready." in self._log.read_text()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def send_signal(self, number: signal.Signals) -> None:
        """SIGKILL is for all of its processes at once."""
        if number == signal.SIGKILL:
            self.kill()
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
