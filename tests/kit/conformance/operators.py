"""What people do to single messages and to many of them in parts, over any store: a suite to be run once per driver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.conformance.queue import Bench, OnBench
from kit.duties import promote_all
from kombu_fdb.errors import MessageTooLarge, QueueError, QueueNotFound
from kombu_fdb.keyspace.codec import CHUNK_BYTES, INLINE_BYTES
from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import Listed, Publication, Spot, State, View

HOUR_S = 3_600
#: Payloads in the record, in one chunk, and in several.
SIZES = (3, INLINE_BYTES + 1, 2 * CHUNK_BYTES + 7)


def listed(bench: Bench, state: State = "ready", queue: str = "q") -> list[Listed]:
    return bench.engine.inspect.page(queue, View(state), 100).messages


def spot(bench: Bench, state: State = "ready", queue: str = "q") -> Spot:
    """Of the first one."""
    return listed(bench, state, queue)[0].spot


def chunks(bench: Bench) -> int:
    """How many of all messages there are in the store."""
    found: list[int] = []
    whole = range_of(bench.engine.keys._key("body"))
    bench.write(lambda tr: found.append(len(tr.get_range(*whole, snapshot=True))))
    return found[-1]


class OperatorsConformance(OnBench):
    """Run over every store."""

    task_ids = True

    # -- reschedule ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", ["", "alice"])
    def test_a_delayed_message_runs_now(self, bench: Bench, key: str) -> None:
        bench.put(b"first", key=key)
        bench.put(b"x", due_ms=bench.clock.wall_ms() + HOUR_S * 1000, key=key, priority=0)
        (before,) = listed(bench, "delayed")
        bench.later(60)
        assert bench.engine.messages.reschedule("q", before.spot, 0)
        assert bench.counts() == (2, 0, 0)
        after = next(each.message for each in listed(bench) if each.message.payload == b"x")
        assert (after.message_id, after.key, after.task_id) == (before.message.message_id, key, b"x".hex())
        assert after.published_ms == bench.clock.wall_ms(), "it waits since now"
        assert bench.payloads() == [b"first", b"x"]

    @pytest.mark.parametrize("state", ["ready", "delayed"])
    @pytest.mark.parametrize("key", ["", "alice"])
    def test_a_message_is_due_at_another_moment(self, bench: Bench, state: State, key: str) -> None:
        due_ms = bench.clock.wall_ms() + 5 * HOUR_S * 1000
        bench.put(b"x", due_ms=due_ms if state == "delayed" else 0, key=key, priority=7)
        moment_ms = bench.clock.wall_ms() + HOUR_S * 1000
        assert bench.engine.messages.reschedule("q", spot(bench, state), moment_ms)
        assert bench.counts() == (0, 1, 0)
        (after,) = listed(bench, "delayed")
        assert (after.due_ms, after.message.key, after.priority) == (moment_ms, key, 7)
        bench.later(HOUR_S - 0.001)
        promote_all(bench.engine)
        assert bench.payloads() == []
        bench.later(0.001)
        promote_all(bench.engine)
        assert bench.payloads() == [b"x"]

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("new_size", SIZES)
    @pytest.mark.parametrize("due", [False, True])
    def test_another_payload_of_any_size_takes_the_place_of_the_old_one(
        self, bench: Bench, size: int, new_size: int, due: bool
    ) -> None:
        bench.put(b"a" * size, due_ms=bench.clock.wall_ms() + HOUR_S * 1000)
        moment_ms = 0 if due else bench.clock.wall_ms() + 60_000
        assert bench.engine.messages.reschedule("q", spot(bench, "delayed"), moment_ms, payload=b"b" * new_size)
        bench.check()
        bench.later(60)
        promote_all(bench.engine)
        (delivery,) = bench.take()
        assert delivery.payload == b"b" * new_size
        bench.engine.messages.ack([delivery.lease])
        assert chunks(bench) == 0, "nothing of either is left"

    def test_what_has_moved_is_left_alone(self, bench: Bench) -> None:
        bench.put(b"x")
        seen = spot(bench)
        bench.take()
        assert not bench.engine.messages.reschedule("q", seen, bench.clock.wall_ms() + 60_000, payload=b"y")
        with pytest.raises(QueueError, match="worker holds"):
            bench.engine.messages.reschedule("q", spot(bench, "leased"), 0)
        assert bench.counts() == (0, 0, 1)

    def test_another_message_at_its_position_is_left_alone(self, bench: Bench) -> None:
        bench.put(b"x")
        seen = spot(bench)
        assert not bench.engine.messages.reschedule("q", seen._replace(message_id=bytes(16)), 0)
        assert not bench.engine.messages.reschedule("q", seen._replace(position=b"nowhere"), 0)
        assert not bench.engine.messages.reschedule("other", seen, 0)
        assert listed(bench)[0].spot == seen

    def test_no_message_is_due_after_its_end(self, bench: Bench) -> None:
        now_ms = bench.clock.wall_ms()
        bench.put(b"x", expires_ms=now_ms + 60_000)
        seen = spot(bench)
        for due_ms in (now_ms + 60_000, now_ms + 60_001):
            with pytest.raises(QueueError, match="expires before"):
                bench.engine.messages.reschedule("q", seen, due_ms)
        assert bench.engine.messages.reschedule("q", seen, now_ms + 59_999)
        (after,) = listed(bench, "delayed")
        assert after.message.expires_ms == now_ms + 60_000

    def test_a_life_of_no_length_begins_when_the_message_is_due(self, bench: Bench) -> None:
        """As RabbitMQ's delayed messages reach their queue, and expire there, once their delay is over."""
        now_ms = bench.clock.wall_ms()
        bench.put(b"x", due_ms=now_ms + 60_000, ttl_ms=0)
        for due_ms in (now_ms + 120_000, now_ms + 30_000):
            assert bench.engine.messages.reschedule("q", spot(bench, "delayed"), due_ms)
            (after,) = listed(bench, "delayed")
            assert (after.due_ms, after.message.expires_ms) == (due_ms, due_ms)
        bench.later(30)
        promote_all(bench.engine)
        (after,) = listed(bench)
        assert after.message.expires_ms == after.message.published_ms == now_ms + 30_000
        with pytest.raises(QueueError, match="expires before"):
            bench.engine.messages.reschedule("q", after.spot, 0)
        assert bench.payloads() == []

    def test_a_payload_over_the_maximum_changes_nothing(self, bench: Bench) -> None:
        bench.put(b"x")
        seen, large = spot(bench), b"y" * (bench.environment.max_message_size + 1)
        with pytest.raises(MessageTooLarge):
            bench.engine.messages.reschedule("q", seen, 0, payload=large)
        self.die(bench)
        with pytest.raises(MessageTooLarge):
            self.replay(bench, payload=large)
        assert bench.engine.inspect.counts("q.dead").ready == 1

    # -- a dead letter with another payload ------------------------------------------------------------------------

    @staticmethod
    def die(bench: Bench) -> None:
        bench.engine.messages.reject([each.lease for each in bench.take()])

    @staticmethod
    def replay(bench: Bench, payload: bytes) -> str | None:
        _state, position, message_id = spot(bench, queue="q.dead")
        return bench.engine.dead_letters.replay_at("q.dead", position, message_id, payload=payload)

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("new_size", SIZES)
    def test_a_dead_letter_comes_back_with_another_payload(self, bench: Bench, size: int, new_size: int) -> None:
        bench.put(b"a" * size, key="alice", priority=4)
        self.die(bench)
        assert self.replay(bench, b"b" * new_size) == "q"
        assert (bench.counts(), bench.engine.inspect.counts("q.dead").ready) == ((1, 0, 0), 0)
        bench.check()
        (after,) = listed(bench)
        assert (after.message.key, after.priority, after.size, len(after.message.deaths)) == ("alice", 4, new_size, 1)
        (delivery,) = bench.take()
        assert delivery.payload == b"b" * new_size
        bench.engine.messages.ack([delivery.lease])
        assert chunks(bench) == 0

    def test_a_dead_letter_that_cannot_come_back_stays_as_it_was(self, bench: Bench) -> None:
        bench.put(b"a" * SIZES[2])
        self.die(bench)
        bench.engine.queues.delete("q")
        with pytest.raises(QueueNotFound):
            self.replay(bench, b"b")
        (dead,) = bench.engine.dead_letters.look(bench.engine.dead_letters.walk("q.dead"), b"", 10)[0]
        assert dead.payload == b"a" * SIZES[2]

    # -- in parts --------------------------------------------------------------------------------------------------

    def test_a_purge_in_parts_leaves_what_came_after_its_beginning(self, bench: Bench) -> None:
        number = 1_100
        bench.engine.publisher.publish([Publication("", "q", b"%d" % each) for each in range(number)])
        purged, mark = bench.engine.queues.purge_some("q")
        bench.put(b"later", b"later too", key="alice")
        while mark:
            part, mark = bench.another().queues.purge_some("q", mark)
            purged += part
        assert purged == number
        assert sorted(bench.payloads()) == [b"later", b"later too"]

    @pytest.mark.parametrize("mark", [b"x", b"\xff" * 10, b"\xff" * 40, bytes(11), b"\xff" * 10 + b"\x01"])
    def test_an_invented_mark_does_no_harm(self, bench: Bench, mark: bytes) -> None:
        bench.put(b"mine", queue="other")
        bench.put(b"x")
        bench.engine.queues.purge_some("q", mark)
        letters = bench.engine.dead_letters
        walk = replace(letters.walk("q"), last=mark[:10])
        letters.discard_part(walk, mark[10:], 100)
        assert bench.payloads(10, "other") == [b"mine"]

    # -- keys ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("prefix", "found"),
        [
            ("", ["", "a", "a\x00", "a\x00b", "ab", "abc", "b", "ü", "üx"]),
            ("a", ["a", "a\x00", "a\x00b", "ab", "abc"]),
            ("a\x00", ["a\x00", "a\x00b"]),
            ("ab", ["ab", "abc"]),
            ("ü", ["ü", "üx"]),
            ("c", []),
        ],
    )
    def test_keys_that_begin_so_in_pages(self, bench: Bench, prefix: str, found: list[str]) -> None:
        for key in ("abc", "üx", "b", "a", "", "a\x00b"):
            bench.put(b"x", key=key)
        bench.take(2)
        bench.put(b"x", key="ab")
        for key in ("ü", "a\x00", ""):
            bench.engine.queues.change_limits("q", key, weight=2)
        expected = bench.engine.inspect.keys_of("q")
        for limit in (1, 2, 100):
            seen, after = list[str](), None
            while page := bench.engine.inspect.key_page("q", after=after, limit=limit, prefix=prefix):
                assert len(page) <= limit
                seen += page
                after = next(reversed(page))
            assert seen == [each for each in found if each in expected]
        assert bench.engine.inspect.key_page("q", after="zzz", limit=3, prefix="a") == {}
