"""A consumer's tag is a name in its channel: two channels of a process may use the same one."""

import pytest
from amqp.exceptions import NotAllowed

TAG = "worker"


def consume(connection, queue, received):
    channel = connection.default_channel
    channel.basic_consume(queue, no_ack=False, callback=received.append, consumer_tag=TAG)
    return channel


def publish(channel, *bodies):
    for body in bodies:
        channel.basic_publish(body, "", "q")


def test_of_two_connections_with_one_tag_one_is_active(connect, until):
    first, second = connect(), connect()
    first.default_channel.queue_declare("q", arguments={"x-single-active-consumer": True})
    served = []
    standing_by = []
    consume(first, "q", served).basic_qos(prefetch_count=1)
    publish(first.default_channel, "a", "b")
    first.drain_events(timeout=60)
    consume(second, "q", standing_by)
    with pytest.raises(TimeoutError):
        second.drain_events(timeout=0)
    first.default_channel.basic_ack(served[0].delivery_tag)
    first.drain_events(timeout=60)
    assert ([message.body for message in served], standing_by) == ([b"a", b"b"], [])
    assert served[0].delivery_info["consumer_tag"] == TAG
    first.close()
    second.drain_events(timeout=60)
    assert [message.body for message in standing_by] == [b"b"]


def test_an_auto_delete_queue_stays_for_the_other_one(connect):
    first, second = connect(), connect()
    first.default_channel.queue_declare("q", auto_delete=True)
    received = []
    leaving = consume(first, "q", [])
    consume(second, "q", received)
    leaving.basic_cancel(TAG)
    assert leaving.engine.inspect.queue("q") is not None
    publish(leaving, "still here")
    second.drain_events(timeout=60)
    assert [message.body for message in received] == [b"still here"]
    second.default_channel.basic_cancel(TAG)
    assert leaving.engine.inspect.queue("q") is None


def test_one_channel_uses_a_tag_once_at_a_time(channel):
    channel.queue_declare("q")
    tag = channel.basic_consume("q", False, print, consumer_tag=TAG)
    with pytest.raises(NotAllowed, match="reuse consumer tag 'worker'"):
        channel.basic_consume("q", False, print, consumer_tag=TAG)
    channel.basic_cancel(tag)
    assert channel.basic_consume("q", False, print, consumer_tag=TAG) == TAG
