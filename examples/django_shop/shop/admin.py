from django.contrib import admin

from shop.models import Customer, Order


@admin.register(Customer)
class CustomerAdmin(admin.ModelAdmin):
    list_display = ("name", "card_works")
    list_editable = ("card_works",)


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("__str__", "price", "state", "placed_at", "paid_at", "reminded_at")
    list_filter = ("state", "customer")
