"""Customers and their orders. An order's state is changed by tasks only."""

from django.db import models


class Customer(models.Model):
    name = models.CharField(max_length=100, unique=True)
    card_works = models.BooleanField(default=True, help_text="The bank accepts this customer's card.")

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    class State(models.TextChoices):
        NEW = "new"
        PAID = "paid"
        FAILED = "failed", "payment failed"

    customer = models.ForeignKey(Customer, on_delete=models.CASCADE, related_name="orders")
    item = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=9, decimal_places=2)
    state = models.CharField(max_length=10, choices=State.choices, default=State.NEW)
    placed_at = models.DateTimeField(auto_now_add=True)
    paid_at = models.DateTimeField(null=True, blank=True)
    reminded_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.item} for {self.customer}"
