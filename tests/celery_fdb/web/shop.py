"""A shop whose tasks do what a page wants to show: most succeed, some are slow, payments of one customer fail."""

import os
import time

from celery import Celery, chain, chord, group

import celery_fdb

app = Celery("shop", broker=os.environ["SHOP_BROKER"], backend=os.environ["SHOP_BROKER"], set_as_current=False)
celery_fdb.install(app, history=True)
app.conf.task_default_queue = "orders"
app.conf.task_routes = {
    "shop.pay": "payments",
    "shop.mail": "mails",
    "shop.remind": "mails",
    "shop.render": "renders",
    "shop.bind": "renders",
    "shop.report": "reports",
}
app.conf.beat_schedule = {
    "nightly report": {"task": "shop.report", "schedule": 86_400.0},
    "unpaid reminders": {"task": "shop.remind", "schedule": 300.0, "args": ("unpaid",)},
}

CUSTOMERS = ("acme", "globex", "hooli", "initech", "umbrella", "wonka")


class CardDeclined(Exception):
    """By the bank."""


@app.task(name="shop.pay", dead_letter=True)
def pay(order, customer):
    time.sleep(0.02)
    if customer == "umbrella":
        raise CardDeclined(f"card of {customer} was declined")
    if order % 37 == 0:
        raise TimeoutError("the bank did not answer within 5 s")
    return f"paid {order}"


@app.task(name="shop.mail")
def mail(order, customer):
    time.sleep(0.03)


@app.task(name="shop.render")
def render(page):
    time.sleep(0.05)
    return page


@app.task(name="shop.bind")
def bind(pages):
    return len(pages)


@app.task(name="shop.report")
def report():
    time.sleep(0.1)


@app.task(name="shop.remind")
def remind(whom):
    time.sleep(0.01)


def order(number):
    """One customer's, with what follows from it."""
    customer = CUSTOMERS[(number * number) % len(CUSTOMERS)]
    headers = {"fair_key": customer}
    pay.apply_async((number, customer), headers=headers)
    mail.apply_async((number, customer), headers=headers)
    if number % 10 == 0:
        remind.apply_async(("unpaid",), countdown=3_600)


def catalogue(pages):
    """A workflow: the pages in parallel, then bound, then mailed."""
    chord(group(render.s(each) for each in range(pages)), bind.s()).apply_async()
    chain(render.s(1), render.si(2), mail.si(3, "acme")).apply_async()
