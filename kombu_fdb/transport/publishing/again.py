"""A message that was delivered, as it was published."""

from __future__ import annotations

from typing import Any

from kombu_fdb.errors import InvalidArgument
from kombu_fdb.model import Death, Publication
from kombu_fdb.transport.encoding.envelope import payload_of, without_deaths
from kombu_fdb.transport.publishing.batch import Encoder


def encode_again(encoder: Encoder, message: Any) -> tuple[Publication, tuple[Death, ...]]:
    """And its history as a dead letter."""
    headers, deaths = without_deaths(message.headers or {})
    again = {
        "body": message.body,
        "content-type": message.content_type,
        "content-encoding": message.content_encoding,
        "headers": headers,
        "properties": message.properties,
    }
    info = message.delivery_info
    exchange, routing_key = info.get("exchange") or "", info.get("routing_key") or info["queue"]
    try:
        return encoder.encode(again, exchange, routing_key), deaths
    except InvalidArgument:  # it came from elsewhere: it keeps its odd headers, and they steer nothing
        plain = encoder.encode({**again, "headers": {}, "properties": {}}, exchange, routing_key)
        return plain._replace(payload=payload_of(again, exchange, routing_key)), deaths
