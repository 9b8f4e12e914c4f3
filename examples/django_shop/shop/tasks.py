"""The shop's tasks. All may run more than once, and do no harm then."""

from celery import shared_task
from django.utils import timezone

from shop.models import Order


class CardDeclined(Exception):
    """The bank said no."""


@shared_task(autoretry_for=(CardDeclined,), max_retries=2, default_retry_delay=0.2, dead_letter=True)
def charge(order_id: int) -> None:
    """Take the money. A declined card is tried three times; then the payment is a dead letter, for a person."""
    order = Order.objects.select_related("customer").get(pk=order_id)
    if order.state == Order.State.PAID:
        return
    Order.objects.filter(pk=order_id).update(state=Order.State.FAILED)  # unless the bank agrees
    ask_bank(order)
    Order.objects.filter(pk=order_id).update(state=Order.State.PAID, paid_at=timezone.now())


def ask_bank(order: Order) -> None:
    """A bank for an example: it looks at a tick in the admin."""
    if not order.customer.card_works:
        raise CardDeclined(f"the card of {order.customer} was declined")


@shared_task
def remind(order_id: int) -> None:
    """Days later, and only if it is still not paid. Until then the message waits in the broker's store."""
    unpaid = Order.objects.filter(pk=order_id).exclude(state=Order.State.PAID)
    unpaid.update(reminded_at=timezone.now())
