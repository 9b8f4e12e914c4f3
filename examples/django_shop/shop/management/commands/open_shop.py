"""``manage.py open_shop``: tables, an admin, customers, and a morning's orders."""

from datetime import timedelta

from django.contrib.auth.models import User
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser

from shop.models import Customer
from shop.orders import REMIND_AFTER, place

#: Who orders how much of what. One of them orders more than all others.
ORDERS = {"Acme": (40, "crate of anvils", "99.00"), "Bell": (2, "bicycle bell", "12.50"), "Cole": (3, "hat", "40.00")}


class Command(BaseCommand):
    help = "Make the tables, the user admin/admin, customers, and their first orders."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--remind-after", type=float, default=REMIND_AFTER.total_seconds(), metavar="SECONDS")

    def handle(self, *, remind_after: float, **_: object) -> None:
        call_command("migrate", verbosity=0)
        if not User.objects.filter(username="admin").exists():
            User.objects.create_superuser("admin", password="admin")
        customers = {name: Customer.objects.get_or_create(name=name)[0] for name in (*ORDERS, "Dunn")}
        Customer.objects.filter(name="Dunn").update(card_works=False)
        later = timedelta(seconds=remind_after)
        for name, (number, item, price) in ORDERS.items():
            for _each in range(number):
                place(customers[name], item, price, remind_after=later)
        failing = place(customers["Dunn"], "garden gnome", "25.00", remind_after=later)
        self.stdout.write(
            f"{sum(number for number, _, _ in ORDERS.values()) + 1} orders are placed. Dunn's card does not work, so "
            f"order {failing.pk} will fail. Next: celery -A django_shop worker, and manage.py runserver."
        )
