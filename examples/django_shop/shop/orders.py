"""Place an order: what a view, a form or a command calls."""

from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from celery_fdb.contrib.outbox.django import apply_async
from shop.models import Customer, Order
from shop.tasks import charge, remind

#: When a customer is reminded of an order that is still not paid.
REMIND_AFTER = timedelta(days=2)


@transaction.atomic
def place(customer: Customer, item: str, price: str, *, remind_after: timedelta = REMIND_AFTER) -> Order:
    """Both tasks are committed with the order, or rolled back with it, and sent right after the commit.

    The customer is the fairness key: a customer who orders 1,000 things at once waits for them, and no other does.
    """
    order = Order.objects.create(customer=customer, item=item, price=price)
    fair = {"headers": {"fair_key": customer.name}}
    apply_async(charge, (order.pk,), **fair)
    apply_async(remind, (order.pk,), eta=timezone.now() + remind_after, **fair)
    return order
