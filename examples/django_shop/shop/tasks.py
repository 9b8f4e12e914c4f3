"""The shop's tasks. All may run more than once, and do no harm then."""

from celery import Task, shared_task
from celery.exceptions import Reject
from django.utils import timezone

from shop.models import Order

ATTEMPTS = 3


class CardDeclined(Exception):
    """The bank said no."""


@shared_task(bind=True, max_retries=ATTEMPTS - 1)
def charge(self: Task, order_id: int) -> None:
    """Take the money. A declined card is tried again, and the last time it becomes a dead letter, for a person."""
    order = Order.objects.select_related("customer").get(pk=order_id)
    if order.state == Order.State.PAID:
        return
    try:
        ask_bank(order)
    except CardDeclined as error:
        if self.request.retries < ATTEMPTS - 1:
            raise self.retry(exc=error, countdown=0.2 * 2**self.request.retries) from error
        Order.objects.filter(pk=order_id).update(state=Order.State.FAILED)
        raise Reject(str(error), requeue=False) from error
    Order.objects.filter(pk=order_id).update(state=Order.State.PAID)


def ask_bank(order: Order) -> None:
    """A bank for an example: it looks at a tick in the admin."""
    if not order.customer.card_works:
        raise CardDeclined(f"the card of {order.customer} was declined")


@shared_task
def remind(order_id: int) -> None:
    """Days later, and only if it is still not paid. Until then the message waits in the broker's store."""
    unpaid = Order.objects.filter(pk=order_id).exclude(state=Order.State.PAID)
    unpaid.update(reminded_at=timezone.now())
