"""How a message came to the queue where it is, and whether a consumer has had it: what a consumer sees of that."""

import pytest

from kombu_fdb import Broker


def publish(channel, exchange, routing_key, body="x"):
    message = channel.prepare_message(body, content_type="text/plain", content_encoding="utf-8")
    channel.basic_publish(message, exchange, routing_key)


def seen_of(message):
    """What RabbitMQ tells as well."""
    headers = message.headers
    deaths = headers.get("x-death") or []
    names = ("queue", "reason", "count", "exchange", "routing-keys")
    return {
        "by": (message.delivery_info["exchange"], message.delivery_info["routing_key"]),
        "deaths": [tuple(death[name] for name in names) for death in deaths],
        "first": tuple(headers.get(f"x-first-death-{name}") for name in ("queue", "reason", "exchange")),
    }


WORK = ("w", "rejected", 1, "ex", ["orig"])
DEAD = ("d", "rejected", 1, "dlx", ["dk"])
FIRST = ("w", "rejected", "ex")
#: Recorded from RabbitMQ 3.10, by this program.
CIRCLE = [
    {"by": ("ex", "orig"), "deaths": [], "first": (None, None, None)},
    {"by": ("dlx", "dk"), "deaths": [WORK], "first": FIRST},
    {"by": ("ex", "wk"), "deaths": [DEAD, WORK], "first": FIRST},
    {"by": ("dlx", "dk"), "deaths": [("w", "rejected", 2, "ex", ["orig"]), DEAD], "first": FIRST},
    {"by": ("ex", "wk"), "deaths": [("d", "rejected", 2, "dlx", ["dk"]), ("w", "rejected", 2, "ex", ["orig"])]},
]


@pytest.mark.parametrize("size", [1, 300_000])
def test_a_message_that_dies_in_a_circle_tells_what_rabbitmq_tells(channel, size):
    channel.exchange_declare("ex", "direct")
    channel.exchange_declare("dlx", "topic")
    for queue, exchange, key in (("w", "dlx", "dk"), ("d", "ex", "wk")):
        arguments = {"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": key}
        channel.queue_declare(queue, arguments=arguments)
    for key in ("wk", "orig"):
        channel.queue_bind("w", "ex", key)
    channel.queue_bind("d", "dlx", "#")
    publish(channel, "ex", "orig", "x" * size)
    for number, expected in enumerate(CIRCLE):
        message = channel.basic_get("wd"[number % 2])
        assert seen_of(message) == {"first": FIRST, **expected}
        message.reject()


def test_without_an_exchange_for_it_a_dead_letter_came_by_its_queue_s_name(channel):
    channel.exchange_declare("ex", "topic")
    channel.queue_declare("q")
    channel.queue_bind("q", "ex", "order.*")
    publish(channel, "ex", "order.eu")
    channel.basic_get("q").reject()
    assert seen_of(channel.basic_get("q.dead")) == {
        "by": ("", "q.dead"),
        "deaths": [("q", "rejected", 1, "ex", ["order.eu"])],
        "first": ("q", "rejected", "ex"),
    }


@pytest.mark.parametrize("size", [1, 300_000])
@pytest.mark.parametrize("how", ["move", "replay"])
def test_what_an_operator_moves_comes_by_the_name_of_its_new_queue(channel, connection, how, size):
    """Else a task that is retried would go back to the queue that it was taken out of."""
    channel.exchange_declare("ex", "topic")
    channel.queue_declare("slow")
    channel.queue_declare("q")
    channel.queue_bind("q", "ex", "#")
    publish(channel, "ex", "order.eu", "x" * size)
    with Broker.open(connection.as_uri(include_password=True)) as broker:
        if how == "move":
            assert broker.queue("q").move("slow") == 1
            target = "slow"
        else:
            channel.basic_get("q").reject()
            assert broker.queue("q").dead_letters.replay() == 1
            target = "q"
    found = channel.basic_get(target)
    assert (seen_of(found)["by"], len(found.body)) == (("", target), size)


def test_a_delayed_message_is_moved_like_others(channel, connection, until):
    channel.queue_declare("q")
    message = channel.prepare_message("x", content_type="text/plain", content_encoding="utf-8", headers={"x-delay": 1})
    channel.basic_publish(message, "", "q")
    with Broker.open(connection.as_uri(include_password=True)) as broker:
        moved = broker.queue("q").move("slow")
    assert moved == 1
    found = until(lambda: channel.basic_get("slow"))
    assert seen_of(found)["by"] == ("", "slow")


class TestRedelivered:
    """https://www.rabbitmq.com/docs/confirms#automatic-requeueing"""

    def test_what_a_callback_had_when_its_channel_closed(self, connection):
        channel, received = connection.channel(), []
        publish(connection.default_channel, "", "q")
        channel.basic_consume("q", False, received.append)
        connection.drain_events(timeout=60)
        channel.close()
        again = connection.default_channel.basic_get("q")
        info = [message.delivery_info["redelivered"] for message in (*received, again)]
        assert (info, again.properties["delivery_info"]["redelivered"], again.headers) == ([False, True], True, {})

    def test_not_what_was_only_claimed_ahead(self, connection, until):
        channel, received = connection.channel(), []
        for _ in range(2):
            publish(connection.default_channel, "", "q")
        channel.basic_qos(prefetch_count=2)
        channel.basic_consume("q", False, received.append)
        connection.drain_events(timeout=60)
        until(lambda: connection.default_channel.engine.inspect.counts("q").leased == 2)
        channel.close()
        found = [connection.default_channel.basic_get("q").delivery_info["redelivered"] for _ in range(2)]
        assert found == [True, False]

    def test_what_a_process_held_at_its_end(self, connect, connection):
        other = connect(ack_delay_ms=6)  # another client of the store
        publish(connection.default_channel, "", "q")
        held = other.default_channel.basic_get("q")
        client = other.transport.store
        assert client is not connection.transport.store
        client.close()
        assert not held.delivery_info["redelivered"]
        assert connection.default_channel.basic_get("q").delivery_info["redelivered"]

    def test_a_dead_letter_is_new_to_its_queue(self, connection):
        channel = connection.channel()
        publish(channel, "", "q")
        channel.basic_get("q")
        channel.close()
        channel = connection.default_channel
        channel.basic_get("q").reject()
        assert not channel.basic_get("q.dead").delivery_info["redelivered"]
