"""Dead letters of messages that are no longer in the store, or never were."""

import pytest
from kit.duties import replay

from kombu_fdb.engine.messages.bury import DETAILS_BYTES, MOST_DETAILED, fitted
from kombu_fdb.keyspace.codec import INLINE_BYTES
from kombu_fdb.model import Death, DeliveryInfo, KeyLimits, Publication
from kombu_fdb.routing.tables import Exchange, QueueDeclaration
from kombu_fdb.transport.envelope import payload_of


def test_a_copy_from_outside_is_what_the_message_was(bench):
    """All that the message had, its history too; the time to run holds where the letter is consumed."""
    bench.engine.queues.declare(QueueDeclaration("q"))
    earlier = Death("before", "rejected", 2, 5, "", ("before",), {})
    copy = Publication("", "q", b"x", key="alice", ttr_ms=700, task_id="t", priority=3, message_id=b"m" * 16)
    bench.engine.publisher.bury_copy("q", copy, [earlier], details={"error": "e"})
    bench.check()
    assert [each.queue for each in bench.engine.inspect.find_task("t")] == ["q.dead"]
    (letter,) = bench.take(1, "q.dead")
    assert (letter.payload, letter.key, letter.ttr_ms, letter.message_id) == (b"x", "alice", 700, b"m" * 16)
    assert letter.delivery_info == DeliveryInfo("", "q.dead")
    died, before = letter.deaths
    assert (died.queue, died.reason, died.count, died.details) == ("q", "rejected", 1, {"error": "e"})
    assert before == earlier
    bench.engine.messages.release([letter.lease])
    replay(bench.engine, "q", 1)
    (message,) = bench.engine.transfer.dump("q")
    assert message.priority == 3


def test_a_copy_may_take_as_long_as_a_publish(bench, monkeypatch):
    run, given = bench.engine.transactions, []
    write = run.write
    monkeypatch.setattr(
        run, "write", lambda body, *timeout, **rest: given.append(timeout) or write(body, *timeout, **rest)
    )
    bench.engine.publisher.bury_copy("q", Publication("", "q", b"x"))
    assert given == [(run.environment.publish_s,)]
    assert run.environment.publish_s != run.environment.call_s


@pytest.mark.parametrize("size", [INLINE_BYTES, INLINE_BYTES + 1, 600_000])
def test_what_a_full_queue_refuses_reaches_all_graves_in_the_transaction_of_its_publisher(bench, size):
    """``publish_in``: nothing can be copied beforehand, however large it is."""
    bench.engine.queues.declare_exchange(Exchange("dlx", "fanout"))
    for grave in ("one", "two", "three", "four"):
        bench.engine.queues.declare(QueueDeclaration(grave))
        bench.engine.queues.bind(grave, "dlx", "")
    refusing = {"x-max-length": 0, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "dlx"}
    bench.engine.queues.declare(QueueDeclaration("q", arguments=refusing))
    publication = Publication("", "q", b"x" * size)
    bench.write(lambda tr: bench.engine.publisher.publish_in(tr, [publication]))
    bench.check()
    for grave in ("one", "two", "three", "four"):
        assert bench.payloads(2, grave) == [b"x" * size]


def test_each_queue_caps_the_priority_that_a_dead_letter_was_published_with(bench):
    """As on RabbitMQ: a queue with few priorities takes none away from the next one."""
    for queue, most, following in (("few", 1, "some"), ("some", 7, "many"), ("many", 9, "end")):
        to = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": following}
        bench.engine.queues.declare(QueueDeclaration(queue, arguments={"x-max-priority": most, **to}))
    older = [Publication("", "some", b"7", 7), Publication("", "some", b"5", 5), Publication("", "many", b"8", 8)]
    bench.engine.publisher.publish([*older, Publication("", "few", b"9", 9)])
    bench.engine.messages.reject([each.lease for each in bench.take(1, "few")])
    bench.check()
    found = bench.take(3, "some")
    assert [each.payload for each in found] == [b"7", b"9", b"5"]
    bench.engine.messages.reject([each.lease for each in found])
    assert bench.payloads(4, "many") == [b"9", b"8", b"7", b"5"]


def replay_to(bench, queue, to):
    bench.engine.dead_letters.replay_part(bench.engine.dead_letters.walk(f"{queue}.dead"), b"", 1, to=to)


def test_a_replay_keeps_the_priority_and_its_queue_caps_it(bench):
    bench.engine.queues.declare(QueueDeclaration("q"))
    bench.engine.queues.declare(QueueDeclaration("few", arguments={"x-max-priority": 1}))
    bench.engine.publisher.publish([Publication("", "few", b"1", 1), Publication("", "q", b"9", 9)])
    bench.engine.messages.reject([each.lease for each in bench.take(1, "q")])
    replay_to(bench, "q", "few")
    bench.check()
    found = bench.take(2, "few")
    assert [each.payload for each in found] == [b"1", b"9"]
    bench.engine.messages.reject([found[1].lease])
    bench.engine.publisher.publish([Publication("", "q", b"8", 8)])
    replay_to(bench, "few", "q")
    assert bench.payloads(2, "q") == [b"9", b"8"]


def kombus(routing_key, body=b"[]"):
    """A message as kombu's."""
    return payload_of({"body": body, "headers": {}, "properties": {}}, "work", routing_key)


@pytest.mark.parametrize("size", [1, INLINE_BYTES, 600_000])
@pytest.mark.parametrize("named", [None, "dead.all"])
def test_a_letter_is_routed_by_its_own_key_unless_the_queue_names_one(bench, size, named):
    """https://www.rabbitmq.com/docs/dlx#routing"""
    bench.engine.queues.declare_exchange(Exchange("work", "topic"))
    bench.engine.queues.declare_exchange(Exchange("dlx", "topic"))
    for grave, pattern in (("eu", "order.eu"), ("us", "order.us"), ("all", "dead.all")):
        bench.engine.queues.declare(QueueDeclaration(grave))
        bench.engine.queues.bind(grave, "dlx", pattern)
    arguments = {"x-dead-letter-exchange": "dlx", **({"x-dead-letter-routing-key": named} if named else {})}
    bench.engine.queues.declare(QueueDeclaration("q", arguments=arguments))
    bench.engine.queues.bind("q", "work", "order.*")
    payload = kombus("order.eu", b"x" * size)
    bench.engine.publisher.publish([Publication("work", "order.eu", payload)])
    (message,) = bench.take(1)
    bench.engine.messages.reject([message.lease])
    counts = {each: bench.counts(each)[0] for each in ("eu", "us", "all", "q.dead")}
    assert counts == {"eu": 0, "us": 0, "all": 0, "q.dead": 0, ("all" if named else "eu"): 1}


def test_a_letter_that_is_rejected_and_expires_comes_back_by_its_own_key(bench):
    """RabbitMQ's delayed retry: work, rejected, a queue with a time to live and no consumer, and back."""
    for name in ("retry", "again"):
        bench.engine.queues.declare_exchange(Exchange(name, "topic"))
    for queue, dlx in (("q", "retry"), ("q.wait", "again")):
        bench.engine.queues.declare(QueueDeclaration(queue, arguments={"x-dead-letter-exchange": dlx}))
    bench.engine.queues.bind("q.wait", "retry", "#")
    bench.engine.queues.bind("q", "again", "order.*")
    bench.engine.publisher.publish([Publication("", "q", kombus("order.eu"))])
    (message,) = bench.take(1)
    bench.engine.messages.reject([message.lease])
    (waiting,) = bench.take(1, "q.wait")
    bench.engine.messages.reject([waiting.lease], reason="expired")
    assert [bench.counts(each)[0] for each in ("q", "q.wait", "q.dead", "q.wait.dead")] == [1, 0, 0, 0]


@pytest.mark.parametrize(("target", "kept"), [("work", True), ("other.dead", False)])
def test_a_letter_in_a_working_queue_is_one_of_its_key_again(bench, target, kept):
    """Its key's limits, its weight and a pause hold for it there; a queue of the dead keeps the order of the deaths."""
    engine = bench.engine
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": target}
    engine.queues.declare(QueueDeclaration("q", arguments=dead))
    engine.queues.limit(target, "acme", KeyLimits(max_in_flight=1))
    engine.publisher.publish([Publication("", "q", b"x", key="acme")] * 5)
    engine.messages.reject([each.lease for each in bench.take(5)])
    assert len(bench.take(5, target)) == (1 if kept else 5)


@pytest.mark.parametrize("arguments", [{}, {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q.dead"}])
def test_a_letter_lives_for_as_long_as_its_queue_is_declared_to_keep_it(bench, arguments):
    """Where no exchange was set, the one of a ``<queue>.dead`` that a program had declared did not count."""
    for queue, given in (("q", arguments), ("q.dead", {"x-message-ttl": 0})):
        bench.engine.queues.declare(QueueDeclaration(queue, arguments=given))
    bench.put(b"x")
    bench.engine.messages.reject([each.lease for each in bench.take(1, "q")])
    assert bench.engine.inspect.counts("q.dead").ready == 1
    assert not bench.take(1, "q.dead")


def test_a_death_that_comes_again_knows_its_first_time_and_its_last(bench):
    """The first one is what RabbitMQ tells; the last one is what "older than" asks for."""
    bench.engine.queues.declare(
        QueueDeclaration("q", arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "q"})
    )
    bench.put(b"x")
    began_ms = bench.clock.wall_ms()
    for _ in range(3):
        bench.later(10)
        (message,) = bench.take(1)
        bench.engine.messages.reject([message.lease])
    (letter,) = bench.take(1)
    (death,) = letter.deaths
    assert (death.count, death.since_ms - began_ms, death.time_ms - began_ms) == (3, 10_000, 30_000)


def test_details_are_cut_where_they_are_longest_and_end_with_the_traceback_s_end(bench):
    """A traceback's last lines say most; of other texts the beginning does."""
    traceback, text = "first line" + "." * DETAILS_BYTES * 4 + "last line", "begin" + "." * DETAILS_BYTES * 2 + "end"
    details = {"traceback": traceback, "error": text, "number": 7, "list": list(range(DETAILS_BYTES))}
    details["nested"] = {"one": "." * DETAILS_BYTES}
    bench.put(b"x")
    bench.engine.messages.reject([each.lease for each in bench.take()], **details)
    ((death,),) = (letter.deaths for letter in bench.take(1, "q.dead"))
    kept = death.details
    assert kept["traceback"].endswith("last line")
    assert not kept["traceback"].startswith("first")
    assert kept["error"].startswith("begin")
    assert not kept["error"].endswith("end")
    assert kept["number"] == 7
    assert kept["list"] == list(range(len(kept["list"])))
    assert kept["list"], "cut, and not emptied"
    assert kept["nested"] == "", "of what has no half nothing is kept"


def test_the_latest_deaths_keep_their_details_and_the_others_are_remembered(bench):
    assert MOST_DETAILED == 4, "as the docs say"
    earlier = [Death(f"q{number}", "rejected", 1, 1, details={"error": "e"}) for number in range(MOST_DETAILED + 1)]
    bench.engine.publisher.bury_copy("q", Publication("", "q", b"x"), earlier, details={"error": "e"})
    (letter,) = bench.take(1, "q.dead")
    assert [death.queue for death in letter.deaths] == ["q", *(each.queue for each in earlier)]
    assert [bool(death.details) for death in letter.deaths] == [True] * MOST_DETAILED + [False] * 2


def test_what_no_transaction_holds_together_dies_into_all_its_queues(bench):
    """Each of the copies fits; all of them are copied beforehand."""
    graves = [f"grave-{number}" for number in range(14)]
    bench.engine.queues.declare_exchange(Exchange("dlx", "fanout"))
    for grave in graves:
        bench.engine.queues.bind(grave, "dlx", "")
    bench.engine.queues.declare(QueueDeclaration("q", arguments={"x-dead-letter-exchange": "dlx"}))
    bench.put(b"x" * 900_000)
    assert bench.engine.messages.reject([each.lease for each in bench.take(1)]) == [True]
    for grave in graves:
        assert bench.payloads(1, grave) == [b"x" * 900_000]


# -- what a letter says of its deaths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("details", "most_bytes", "left"),
    [
        ({"error": "12345678"}, 20, {"error": "12345678"}),  # {"error":"12345678"}
        ({"error": "12345678"}, 19, {"error": "1234"}),
        ({"error": "123456789"}, 19, {"error": "1234"}),
        ({"traceback": "12345678"}, 23, {"traceback": "5678"}),
        ({"error": "123", "traceback": "12345678"}, 30, {"error": "1", "traceback": "78"}),
        ({"error": "1234", "args": [1, 2, 3, 4, 5]}, 30, {"error": "1234", "args": [1, 2]}),
        ({"a": 12345678901234567890}, 20, {"a": ""}),
        ({"a": {"deep": "er and deeper"}}, 20, {"a": ""}),
        ({"a": "1"}, 7, {}),
    ],
)
def test_the_longest_of_the_details_is_halved_emptied_and_left_out_until_they_fit(details, most_bytes, left):
    given = dict(details)
    assert fitted(details, most_bytes) == left
    assert details == given
