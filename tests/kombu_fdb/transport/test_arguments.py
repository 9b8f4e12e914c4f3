"""Everything that RabbitMQ knows of a queue, an exchange, a consumer or a message is honoured, harmless or refused."""

from pathlib import Path

import pytest
from amqp.exceptions import NotFound, PreconditionFailed

from kombu_fdb.engine.topology import ARGUMENT_KINDS
from kombu_fdb.errors import InvalidArgument

PAGE = (Path(__file__).parents[3] / "docs" / "queue-arguments.md").read_text()

#: https://www.rabbitmq.com/docs/queues#optional-arguments, and those of quorum queues and streams.
RABBITMQ = {
    "x-message-ttl": (1, "honoured"),
    "x-expires": (1, "honoured"),
    "x-max-length": (1, "honoured"),
    "x-max-length-bytes": (1, "honoured"),
    "x-overflow": ("reject-publish-dlx", "honoured"),
    "x-dead-letter-exchange": ("", "honoured"),
    "x-delivery-limit": (1, "honoured"),
    "x-max-priority": (1, "honoured"),
    "x-single-active-consumer": (True, "honoured"),
    "x-consumer-timeout": (1, "honoured"),
    "x-queue-type": ("quorum", "harmless"),
    "x-queue-mode": ("lazy", "harmless"),
    "x-queue-version": (2, "harmless"),
    "x-queue-leader-locator": ("balanced", "harmless"),
    "x-queue-master-locator": ("min-masters", "harmless"),
    "x-quorum-initial-group-size": (3, "harmless"),
    "x-max-in-memory-length": (1, "harmless"),
    "x-max-in-memory-bytes": (1, "harmless"),
    "x-dead-letter-strategy": ("at-least-once", "harmless"),
    "x-max-age": ("7D", "refused"),
}


def test_queue_arguments(channel):
    for argument, (value, what_of_it) in RABBITMQ.items():
        queue = f"with {argument}"
        if what_of_it == "refused":
            with pytest.raises(PreconditionFailed, match=argument):
                channel.queue_declare(queue, arguments={argument: value})
            assert channel.engine.inspect.queue(queue) is None
        else:
            channel.queue_declare(queue, arguments={argument: value})
            assert f"`{argument}`" in PAGE
            assert (argument in ARGUMENT_KINDS) or what_of_it == "harmless", argument


def test_a_stream_is_refused(channel):
    with pytest.raises(PreconditionFailed, match="classic or quorum"):
        channel.queue_declare("q", arguments={"x-queue-type": "stream"})


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"arguments": {"x-priority": 10}}, "x-single-active-consumer"),
        ({"arguments": {"x-stream-offset": "first"}}, "no streams"),
        ({"exclusive": True}, "x-single-active-consumer"),
        ({"arguments": {"x-priority": 0}}, None),
        ({"arguments": {"x-cancel-on-ha-failover": True}}, None),
        ({"arguments": None, "exclusive": False}, None),
    ],
)
def test_what_a_consumer_asks_for(channel, options, fix):
    channel.queue_declare("q")
    if fix is None:
        assert channel.basic_consume("q", False, print, **options)
    else:
        with pytest.raises(PreconditionFailed, match=fix):
            channel.basic_consume("q", False, print, **options)


@pytest.mark.parametrize(
    ("headers", "options", "error", "fix"),
    [
        ({"CC": ["other"]}, {}, InvalidArgument, "Publish once for each key"),
        ({"BCC": ("other",)}, {}, InvalidArgument, "Publish once for each key"),
        ({}, {"immediate": True}, PreconditionFailed, "an expiration"),
    ],
)
def test_what_a_publisher_asks_for(channel, headers, options, error, fix):
    message = channel.prepare_message("x", content_type="text/plain", content_encoding="utf-8", headers=headers)
    with pytest.raises(error, match=fix):
        channel.basic_publish(message, "", "q", **options)
    assert not channel.engine.inspect.exists("q")


def test_a_header_cc_that_is_no_list_is_the_applications(channel):
    message = channel.prepare_message("x", content_type="t/p", content_encoding="utf-8", headers={"CC": "me@home"})
    channel.basic_publish(message, "", "q")
    assert channel.basic_get("q").headers == {"CC": "me@home"}


def test_a_prefetch_in_bytes_is_refused(channel):
    with pytest.raises(PreconditionFailed, match="prefetch_count"):
        channel.basic_qos(prefetch_size=1000, prefetch_count=1)


class TestAlternateExchange:
    def test_what_reaches_no_queue_goes_there(self, channel):
        channel.exchange_declare("rest", "fanout")
        channel.exchange_declare("ex", "direct", arguments={"alternate-exchange": "rest"})
        for queue, exchange in (("q", "ex"), ("unrouted", "rest")):
            channel.queue_declare(queue)
            channel.queue_bind(queue, exchange, "key")
        for key in ("key", "nobody's"):
            channel.basic_publish(key, "ex", key)
        found = [channel.basic_get(queue) for queue in ("q", "unrouted")]
        assert [message.body for message in found] == [b"key", b"nobody's"]
        assert found[1].delivery_info["exchange"] == "ex", "as in RabbitMQ"

    def test_a_message_that_went_there_is_not_returned(self, channel):
        returned = []
        channel.events["basic_return"].add(lambda *each: returned.append(each))
        channel.exchange_declare("rest", "fanout")
        channel.exchange_declare("ex", "direct", arguments={"alternate-exchange": "rest"})
        channel.queue_declare("unrouted")
        channel.basic_publish("x", "ex", "key", mandatory=True)
        assert len(returned) == 1, "no queue is bound there yet"
        channel.queue_bind("unrouted", "rest")
        channel.basic_publish("x", "ex", "key", mandatory=True)
        assert len(returned) == 1

    def test_it_is_a_part_of_the_declaration(self, channel):
        channel.exchange_declare("ex", "direct")
        with pytest.raises(PreconditionFailed, match="alternate: rest"):
            channel.exchange_declare("ex", "direct", arguments={"alternate-exchange": "rest"})
        with pytest.raises(PreconditionFailed, match="alternate-exchange must be a string"):
            channel.exchange_declare("other", "direct", arguments={"alternate-exchange": 5})


class TestGone:
    """A queue that is neither declared nor has ever had a message since."""

    @pytest.mark.parametrize(
        "verb",
        [
            lambda channel: channel.basic_consume("q", False, print),
            lambda channel: channel.basic_get("q"),
            lambda channel: channel.queue_purge("q"),
            lambda channel: channel.queue_bind("q", "amq.direct", "key"),
            lambda channel: channel.queue_declare("q", passive=True),
        ],
        ids=["consume", "get", "purge", "bind", "passive"],
    )
    def test_what_needs_it_is_refused(self, channel, verb):
        channel.queue_declare("q")
        verb(channel)
        for tag in list(channel._subscriptions):
            channel.basic_cancel(tag)
        channel.queue_delete("q")
        with pytest.raises(NotFound, match="no queue 'q'"):
            verb(channel)
        channel.basic_publish("x", "", "q")
        verb(channel)  # a message to its name has made it

    def test_the_queue_of_its_dead_letters_needs_no_declaration(self, channel):
        assert channel.basic_get("q.dead") is None
        assert channel.queue_purge("q.dead") == 0

    def test_what_ends_it_is_not(self, channel):
        channel.queue_unbind("q", "amq.direct", "key")
        assert channel.queue_delete("q") == 0


def test_a_passive_declaration_counts_consumers(connection):
    channel, other = connection.default_channel, connection.channel()
    channel.queue_declare("q", exclusive=True)
    tags = [each.basic_consume("q", False, print) for each in (channel, other)]
    assert channel.queue_declare("q", passive=True).consumer_count == 2
    channel.basic_cancel(tags[0])
    assert channel.queue_declare("q", passive=True).consumer_count == 1
