"""Place an order: what a view, a form or a command calls."""

from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from shop.models import Customer, Order
from shop.tasks import charge, remind

#: When a customer is reminded of an order that is still not paid.
REMIND_AFTER = timedelta(days=2)


@transaction.atomic
def place(customer: Customer, item: str, price: str, *, remind_after: timedelta = REMIND_AFTER) -> Order:
    """Both tasks are sent when the transaction commits, and not at all if it is rolled back.

    The customer is the fairness key: who orders 1,000 things at once waits for them, and nobody else does.
    """
    order = Order.objects.create(customer=customer, item=item, price=price)
    fair = {"headers": {"fair_key": customer.name}}
    charge.apply_async_on_commit((order.pk,), **fair)
    remind.apply_async_on_commit((order.pk,), eta=timezone.now() + remind_after, **fair)
    return order
