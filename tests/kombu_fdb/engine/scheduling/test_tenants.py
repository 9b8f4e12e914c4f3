"""FAIR, whatever happened before: a key waits for those that wait beside it, never for those that did once."""

import pytest
from kit.duties import replay, trim_all

from kombu_fdb.keyspace.layout import range_of
from kombu_fdb.model import KeyLimits, Publication, QueueControl, View
from kombu_fdb.routing.tables import QueueDeclaration

USERS = 300
LETTERS = 100


def crowd(bench, **properties):
    """A tenant with many users, each with a message; all of them have their turns in the ring."""
    users = [Publication("", "q", b"", key=f"big/{n}", task_id=f"t{n}", **properties) for n in range(USERS)]
    bench.engine.publisher.publish(users)
    bench.engine.publisher.publish([Publication("", "q", b"", key=key) for key in ("a", "b")] * 10)
    for _ in range(4):
        bench.engine.messages.ack([each.lease for each in bench.take(2)])


def overflown(bench):
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-max-length": 1}))
    bench.later(2)
    for _ in range(8):
        bench.put(b"", key="a")
    bench.engine.upkeep.trim_full_part("q")
    bench.engine.queues.declare(QueueDeclaration("q"))
    bench.later(2)


def paused_together(bench):
    """All but the two that have limits of their own, and the one that comes."""
    for key in ("a", "b", "big/new"):
        bench.engine.queues.limit("q", key, KeyLimits())
    bench.engine.queues.change_control("q", every_key={"paused": True})


def paused_as_the_others(bench):
    """They lose their own limits, by which they were not paused."""
    users = [f"big/{number}" for number in range(USERS)]
    for key in ("a", "b", "big/new", *users):
        bench.engine.queues.limit("q", key, KeyLimits())
    bench.engine.queues.change_control("q", every_key={"paused": True})
    for key in users:
        bench.engine.queues.limit("q", key, None)


def crashed(bench):
    session = bench.engine.sessions.open({})
    while bench.take(50, session=session):
        pass
    bench.engine.sessions.close(session)
    bench.engine.queues.purge("q")


def delete(bench, number):
    for each in bench.engine.inspect.find_task(f"t{number}"):
        assert bench.engine.messages.delete("q", each.message_id)


def each_user(verb):
    return lambda bench: [verb(bench, number) for number in range(USERS)]


def until_empty(verb):
    def settle(bench):
        while found := bench.take(50):
            getattr(bench.engine.messages, verb)([each.lease for each in found])

    return settle


WAYS = {
    "purged": lambda bench: bench.engine.queues.purge("q"),
    "cancelled": each_user(lambda bench, number: bench.engine.messages.cancel(f"t{number}")),
    "deleted": each_user(delete),
    "moved": lambda bench: bench.engine.messages.move("q", "elsewhere"),
    "moved by key": each_user(lambda bench, n: bench.engine.messages.move("q", "elsewhere", key=f"big/{n}")),
    "overflown": overflown,
    "paused": each_user(lambda bench, n: bench.engine.queues.limit("q", f"big/{n}", KeyLimits(paused=True))),
    "paused together": paused_together,
    "paused as the others": paused_as_the_others,
    "served": until_empty("ack"),
    "crashed": crashed,
    "dead": until_empty("reject"),
    "deleted with the queue": lambda bench: bench.engine.queues.delete("q"),
}


def wait_of(bench, key, others=60):
    """How many messages are served before one of this key that comes now, while two keys always have some."""
    for _ in range(others):
        bench.engine.publisher.publish([Publication("", "q", b"", key=each) for each in ("a", "b")])
    bench.engine.publisher.publish([Publication("", "q", b"new", key=key)])
    for number in range(2 * others):
        (delivery,) = _next(bench)
        if delivery.payload == b"new":
            return number
    raise AssertionError("it waits for more than a hundred")


def _next(bench):
    """A claim may find only turns without messages; then the next one goes on."""
    while not (found := bench.take(1)):
        assert bench.engine.messages.arm(["q"]) is None
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_tenant_does_not_wait_for_the_turns_it_had(bench, way):
    crowd(bench)
    WAYS[way](bench)
    assert wait_of(bench, "big/new") <= 2 + 2  # two active keys, and the round that has begun
    bench.engine.queues.purge("q")


@pytest.mark.parametrize("newcomer", ["next", "current", "first"])
def test_whatever_newcomers_get(bench, newcomer):
    bench.engine.queues.set_control("q", QueueControl(newcomer=newcomer))
    crowd(bench)
    bench.engine.queues.purge("q")
    assert wait_of(bench, "big/new") <= 4


def test_a_tenant_waits_for_the_turns_it_has(bench):
    """Of 300 users 290 are gone: a new one waits for ten of its own, and as many rounds of the two others."""
    crowd(bench)
    for number in range(10, USERS):
        bench.engine.messages.cancel(f"t{number}")
    assert wait_of(bench, "big/new") <= 3 * (10 + 2)


def test_a_message_that_comes_back_is_not_lost_with_its_turn(bench):
    crowd(bench)
    bench.engine.queues.purge("q")
    for number in range(10):
        bench.put(b"%d" % number, key=f"big/{number}", priority=number % 2)
    served = set()
    while found := bench.take(3):
        served |= {each.payload for each in found}
    assert served == {b"%d" % number for number in range(10)}


def test_tenants_leave_no_rows(bench):
    """Nor a wrong number: at the end each tenant has none in the ring."""
    crowd(bench)
    for number in range(0, USERS, 3):
        bench.engine.messages.cancel(f"t{number}")
    for number in range(1, USERS, 3):
        bench.engine.queues.limit("q", f"big/{number}", KeyLimits(paused=True))
    bench.take(20)
    for number in range(1, USERS, 3):
        bench.engine.queues.limit("q", f"big/{number}", None)
    while bench.take(50):
        pass
    rows = bench.engine.transactions.read(lambda work: work.tr.get_range(*bench.engine.keys.fairness("q")[3]))
    assert rows == []


def turns_of(bench, queue):
    """How many turns stand in the ring, and how many tenants have some, by the store's rows."""
    keys = bench.engine.keys

    def body(work):
        ring, turns = work.tr.get_ranges(
            [(*range_of(keys.ring(queue)), 0), (*keys.fairness(queue)[3], 0)], snapshot=True
        )
        return len(ring), len(turns)

    return bench.engine.transactions.read(body)


def replayed(bench):
    assert replay(bench.engine, "q", LETTERS) == LETTERS


def replayed_to_another(bench):
    assert (
        bench.engine.dead_letters.replay_part(bench.engine.dead_letters.walk("q.dead"), b"", LETTERS, to="r")[0]
        == LETTERS
    )


def replayed_to_itself(bench):
    """They have no turns in the ring until the next claim."""
    assert (
        bench.engine.dead_letters.replay_part(bench.engine.dead_letters.walk("q.dead"), b"", LETTERS, to="q.dead")[0]
        == LETTERS
    )


def replayed_one_by_one(bench):
    for each in bench.engine.inspect.page("q.dead", View("ready"), LETTERS).messages:
        assert bench.engine.dead_letters.replay_at("q.dead", each.position, each.message.message_id) == "q"


def discarded(bench):
    assert bench.engine.dead_letters.discard_part(bench.engine.dead_letters.walk("q.dead"), b"", LETTERS)[0] == LETTERS


def trimmed(bench):
    bench.later(2)
    assert trim_all(bench.engine) == LETTERS


@pytest.mark.parametrize(
    "way",
    [replayed, replayed_to_another, replayed_to_itself, replayed_one_by_one, discarded, trimmed],
    ids=lambda way: way.__name__,
)
def test_dead_letters_of_tenants_take_their_turns_with_them(bench, way):
    for queue in ("q", "r"):
        bench.put(b"", queue=queue)  # so that it is there
    bench.engine.publisher.publish(
        [Publication("", "q.dead", b"", key=f"big/{n}", ttl_ms=1000) for n in range(LETTERS)]
    )
    bench.engine.publisher.publish([Publication("", "q.dead", b"", key="z")])
    (first,) = bench.take(1, "q.dead")
    bench.engine.messages.release([first.lease])
    assert turns_of(bench, "q.dead")[1] == 1
    way(bench)
    assert turns_of(bench, "q.dead") == (1, 0)


def test_keys_that_are_paused_together_leave_the_ring_at_once(bench):
    """In parts, and those with limits of their own stay."""
    crowd(bench)
    bench.engine.queues.limit("q", "big/7", KeyLimits(weight=2))
    bench.engine.queues.change_control("q", every_key={"paused": True})
    assert turns_of(bench, "q") == (1 + 2, 1)  # big/7, and a and b, which have no tenant and go with their rounds
    bench.engine.queues.change_control("q", every_key={"paused": False})
    served = set()
    while found := bench.take(1000):  # each answers some of the bells
        served |= {each.key for each in found}
    assert len(served) >= USERS - 2


def test_a_key_of_another_priority_takes_its_place_in_that_ones_rounds(bench):
    """The round of the rank where the messages are says nothing about the rank where the key's turns are."""
    for key in "ab":
        bench.engine.publisher.publish([Publication("", "q", b"", key=key)] * 200)
    for _ in range(200):
        bench.take(2)  # a hundred rounds and more of priority 0
    for key in "ab":
        bench.engine.publisher.publish([Publication("", "q", b"", key=key, priority=9)] * 60)
    bench.engine.queues.limit("q", "vip", KeyLimits(priority=9))
    bench.take(4)
    bench.put(b"new", key="vip")
    waits = [each.payload for each in bench.take(8)].index(b"new")
    assert waits <= 2 * 2


def test_dead_turns_cost_claims_no_service(bench):
    """Keys without a tenant: their turns stay until their round, and a claim passes over them all."""
    bench.engine.publisher.publish([Publication("", "q", b"", key=f"k{n}") for n in range(1000)])
    for _ in range(6):
        bench.take(1)
    bench.engine.queues.purge("q")
    bench.put(b"new", key="new")
    claims = 0
    while not any(each.payload == b"new" for each in bench.take(1)):
        claims += 1
    assert claims <= 1000 / 200 + 1
