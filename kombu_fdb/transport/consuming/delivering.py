"""A message's way from the inbox to its callback, in the thread that drains."""

from __future__ import annotations

from typing import Any

from kombu_fdb.transport.consuming.reception import Reception
from kombu_fdb.transport.consuming.subscription import Arrival
from kombu_fdb.transport.errors import CONNECTION_ERRORS
from kombu_fdb.transport.worker.poison import fault_in, survive


def deliver_next(reception: Reception) -> bool:
    """False if there is nothing to deliver. Raises the reception's error, and what the callback raises.

    That a consumer has ended with its queue is something, too.
    """
    if reception.ended:
        ended = reception.ended[0]
        try:
            ended.on_cancel(ended)
        finally:
            reception.ended.popleft()
        return True
    hand: list[Arrival] = []
    try:
        while reception.next(hand) is not None:
            arrival = hand[0]
            message, callback = _open(arrival), arrival.subscription.callback
            if message is None:
                hand = []
                reception.on_room()  # its place is free, and no ack will tell
                continue
            try:
                hand = []  # no call from here to the callback, as Python looks for signals after each
                callback(message)
            except BaseException as error:
                if isinstance(error, CONNECTION_ERRORS):
                    raise
                if not reception.is_workers:
                    _note_attempt(arrival)
                    raise
                if not isinstance(error, Exception):
                    raise
                survive(message, arrival.delivery, error)
            return True
    except BaseException:
        reception.return_undelivered(hand)  # what no callback has seen
        raise
    return False


def _note_attempt(arrival: Arrival) -> None:
    if arrival.tag in arrival.subscription.credit.held.leases:
        arrival.subscription.settler.note_attempt(arrival.delivery.lease)


def _open(arrival: Arrival) -> Any:
    """The message; None if it can't be one, and has been dead-lettered."""
    subscription, delivery, tag = arrival
    message = subscription.open(delivery, tag, subscription.consumer_tag)
    if message is None:
        return None
    fault = fault_in(message, subscription.callback)
    if fault is not None:
        subscription.credit.held.drop(tag)
        subscription.settler.refuse(delivery, **fault)
        return None
    if subscription.no_ack and delivery.leased:
        subscription.settler.note_ack(delivery.lease)
        subscription.settler.acknowledged()
    return message
