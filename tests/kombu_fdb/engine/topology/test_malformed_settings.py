"""Unreadable settings, leases and beats stop no publish, claim, sweep or duty."""

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.codec import Message, encode_lease
from kombu_fdb.model import KeyLimits, QueueControl
from kombu_fdb.primitives.ranges import LONGEST_S
from kombu_fdb.routing.tables import Exchange, QueueDeclaration

ODD = [b"\xff", b"[", b"{}", b"[1]", b'{"weight":0}', b'[true,false,false,{"x-expires":"soon"}]']
#: Of these, what can't be read hands out nothing.
BRAKES = {
    "control": lambda keys: keys.control("q"),
    "limits": lambda keys: keys.limits("q", "k"),
}
SETTINGS = {
    "declaration": lambda keys: keys.queue("q"),
    "session": lambda keys: keys.session(b"s" * 16),
    "beat": lambda keys: keys.beat(b"s" * 16),
    "exchange": lambda keys: keys.exchange("dlx"),
    "active consumer": lambda keys: keys.single("q"),
}


@pytest.fixture
def bench():
    return Bench(FaultyDatabase())


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=[*SETTINGS])
def test_work_goes_on(bench, setting, value):
    engine = bench.engine
    engine.queues.limit("q", "k", KeyLimits(weight=2))
    bench.write(lambda tr: tr.set(setting(engine.keys), value))
    bench.put(b"1", b"2", key="k")
    bench.put(b"3", due_ms=bench.clock.wall_ms() + 1)
    first, _second = bench.take(2)
    engine.messages.reject([first.lease])
    engine.messages.arm(["q"])
    duties = bench.duties()
    for _ in range(60):
        bench.later(5)
        engine.sessions.beat(bench.session)
        duties.run_once()
    assert bench.payloads() == [b"3"]
    engine.inspect.facts(["q"])
    engine.inspect.sessions()
    engine.inspect.exchanges()
    engine.inspect.keys_of("q")
    bench.check()


@pytest.mark.parametrize("value", [each for each in ODD if each != b"{}"])
@pytest.mark.parametrize("brake", BRAKES.values(), ids=[*BRAKES])
def test_what_may_be_a_pause_is_one_until_it_is_set_anew(bench, brake, value):
    engine = bench.engine
    engine.queues.limit("q", "k", KeyLimits(weight=2))
    bench.write(lambda tr: tr.set(brake(engine.keys), value))
    bench.put(b"1", key="k")
    assert bench.payloads() == []
    bench.duties().run_once()
    engine.queues.declare(QueueDeclaration("q", arguments={"x-consumer-timeout": 5_000}))
    engine.queues.set_control("q", QueueControl())
    engine.queues.limit("q", "k", KeyLimits(weight=2))
    assert bench.payloads() == [b"1"]
    bench.check()


def test_a_control_that_is_set_anew_has_what_the_queue_is_declared_with(bench):
    """Also if it was declared while its control could not be read: to declare it again unchanged writes nothing."""
    engine = bench.engine
    bench.write(lambda tr: tr.set(engine.keys.control("q"), b"\xff"))
    declaration = QueueDeclaration("q", arguments={"x-single-active-consumer": True, "x-consumer-timeout": 5_000})
    engine.queues.declare(declaration)
    engine.queues.set_control("q", QueueControl())
    engine.queues.declare(declaration)
    control = engine.inspect.control("q")
    assert (control.single_active, control.consumer_timeout_ms) == (True, 5_000)
    engine.queues.set_control("q", QueueControl())
    assert engine.inspect.control("q").single_active


@pytest.mark.parametrize(("milliseconds", "ageing"), [(5_000, 5.0), (2**53 - 1, LONGEST_S), (None, None)])
def test_a_control_that_is_reset_ages_as_the_queue_is_declared(bench, milliseconds, ageing):
    engine = bench.engine
    engine.queues.declare(QueueDeclaration("q", arguments={"x-fair-ageing": milliseconds}))
    engine.queues.change_control("q", ageing=1.0, newcomer="first")
    engine.queues.reset_control("q")
    assert engine.inspect.control("q") == QueueControl(ageing=ageing)


def test_an_unreadable_control_that_is_reset_has_what_the_queue_is_declared_with(bench):
    engine = bench.engine
    engine.queues.declare(QueueDeclaration("q", arguments={"x-single-active-consumer": True}))
    bench.write(lambda tr: tr.set(engine.keys.control("q"), b"\xff"))
    engine.queues.reset_control("q")
    assert engine.inspect.control("q").single_active


def test_keys_that_an_unreadable_control_has_parked_are_served_when_it_is_set_anew(bench):
    engine = bench.engine
    bench.put(b"1", key="k")
    engine.queues.set_control("q", QueueControl(every_key=KeyLimits(paused=True)))
    assert bench.payloads() == []
    bench.write(lambda tr: tr.set(engine.keys.control("q"), b"\xff"))
    engine.queues.set_control("q", QueueControl())
    bench.duties().run_once()
    assert bench.payloads() == [b"1"]


def test_who_asks_for_settings_is_told_that_they_cannot_be_read_and_setting_them_mends_them(bench):
    engine, keys = bench.engine, bench.engine.keys
    for key in (keys.control("q"), keys.limits("q", "k"), keys.queue("q")):
        bench.write(lambda tr, key=key: tr.set(key, b"\xff"))
    for ask in (
        lambda: engine.inspect.control("q"),
        lambda: engine.inspect.limits("q", "k"),
        lambda: engine.inspect.queue("q"),
    ):
        with pytest.raises(FormatError):
            ask()
    engine.queues.set_control("q", QueueControl(paused=True))
    engine.queues.limit("q", "k", KeyLimits(weight=2))
    engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 3}))
    assert engine.inspect.control("q") == QueueControl(paused=True, limited=True)
    assert engine.inspect.limits("q", "k") == KeyLimits(weight=2)
    assert engine.inspect.queue("q") == QueueDeclaration("q", arguments={"x-max-length": 3})


def test_a_queue_whose_declaration_cannot_be_read_does_not_expire(bench):
    engine = bench.engine
    engine.queues.declare(QueueDeclaration("q", arguments={"x-expires": 1_000}))
    bench.write(lambda tr: tr.set(engine.keys.queue("q"), b"\xff"))
    assert engine.queues.expiring() == []


def test_a_dead_letter_exchange_that_cannot_be_read_counts_as_not_set(bench):
    engine = bench.engine
    engine.queues.declare_exchange(Exchange("dlx", "fanout"))
    engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "dlx"}))
    engine.queues.bind("graves", "dlx", "")
    bench.write(lambda tr: tr.set(engine.keys.exchange("dlx"), b'["headers",true,false,{}]'))
    bench.put(b"x")
    (delivery,) = bench.take()
    engine.messages.reject([delivery.lease])
    assert bench.payloads(1, "q.dead") == [b"x"]


@pytest.mark.parametrize("record", [b"", b"\x01", b"\x01\xff\xff", b"\x03" * 200])
def test_a_lease_of_malformed_bytes_is_swept_as_it_is(bench, record):
    """Also where there is no delivery limit, by which it would have been looked at."""
    engine = bench.engine
    engine.queues.declare(QueueDeclaration("q", arguments={"x-delivery-limit": -1}))
    bench.put(b"x")
    (delivery,) = bench.take()
    key = engine.keys.lease(*delivery.lease)
    queue, place, _ = Message.of_lease(engine.transactions.read(lambda work: work.tr.get(key)) or b"")
    bench.write(lambda tr: tr.set(key, encode_lease(Message(queue, place, record))))
    engine.sessions.fence(bench.session, bench.beats()[bench.session])
    assert engine.sessions.release(bench.session) == 1
    (letter,) = engine.transactions.read(
        lambda work: work.tr.get_range(engine.keys.at("q", place), engine.keys.at("q", place) + b"\0")
    )
    assert letter[1] == record


def test_a_lease_whose_place_is_no_place_is_kept_for_a_person_to_look_at(bench):
    engine, lease = bench.engine, bench.engine.keys.lease(bench.session, 5)
    bench.write(lambda tr: tr.set(lease, encode_lease(Message("q", b"\x02key\x00", b"record"))))
    engine.sessions.fence(bench.session, bench.beats()[bench.session])
    assert engine.sessions.release(bench.session) == 1
    assert engine.inspect.counts("unreadable.dead").ready == 1
