"""The Django example as its README tells it: real worker, real web server, and a person in a real browser.

``ADMIN_PICTURE=docs/django-admin.png pytest tests/examples/test_django_shop.py -k browser`` takes the documentation's
picture anew.
"""

import os
import re
import sqlite3
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest
from kit.browser import chromium
from kit.processes import Programs, run_python, until

django = pytest.importorskip("django", reason="Django is not installed")
if django.VERSION < (5, 1):
    pytest.skip("the example needs Django 5.1", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "examples" / "django_shop"

pytestmark = [pytest.mark.process, pytest.mark.timeout(1200)]

#: How wide a page is, and what a form asks, does not depend on the store; the admin's own tests do all of it on each.
on_sqlite = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


class Shop(Programs):
    """The project in a directory of its own, and its processes."""

    def __init__(self, directory, broker):
        paths = os.pathsep.join([str(SHOP), str(ROOT)])
        env = {**os.environ, "SHOP_DIRECTORY": str(directory), "CELERY_BROKER_URL": broker, "PYTHONPATH": paths}
        env.pop("DJANGO_SETTINGS_MODULE", None)
        super().__init__(directory, env, SHOP)

    def manage(self, *arguments):
        return run_python("-W", "error", "manage.py", *arguments, cwd=SHOP, env=self.env).stdout

    def start_worker(self, *arguments):
        options = ("-n", "worker@shop", "-c", "2", "-l", "INFO", *arguments)
        log = self.start("worker", "-m", "celery", "-A", "django_shop", "worker", *options)
        until(lambda: " ready." in log.read_text(), say=log.read_text)

    def start_server(self):
        """Its address."""
        log = self.start("server", "manage.py", "runserver", "--noreload", "127.0.0.1:0")
        found = until(lambda: re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()), say=log.read_text)
        return str(found[0])

    def query(self, sql):
        with closing(sqlite3.connect(self.directory / "shop.sqlite3", timeout=20)) as connection:
            return connection.execute(sql).fetchall()

    def states(self):
        return Counter(state for (state,) in self.query("SELECT state FROM shop_order"))

    def told(self):
        """The orders, and the ends of the logs."""
        return "\n".join([str(self.states()), *(log.read_text()[-3000:] for log in self.directory.glob("*.log"))])


@pytest.fixture
def shop(url, tmp_path):
    shop = Shop(tmp_path, url)
    yield shop
    shop.stop()


def test_a_fresh_project_passes_djangos_checks(shop):
    shop.manage("migrate", "-v", "0")
    assert "no issues" in shop.manage("check")
    assert "No changes detected" in shop.manage("makemigrations", "--check", "--dry-run")


def test_the_shop_at_work(shop):
    """Orders are paid, a failing payment ends in dead letters, unpaid ones are reminded when it is time."""
    assert "46 orders" in shop.manage("open_shop", "--remind-after", "4")
    shop.start_worker()
    until(lambda: shop.states() == {"paid": 45, "failed": 1}, say=shop.told)
    until(lambda: re.search(r"payments\s+0\s+0\s+0\s+1\s", shop.manage("fdb", "queues")))
    join = "shop_order o JOIN shop_customer c ON c.id = o.customer_id WHERE reminded_at IS NOT NULL"
    waited = "(julianday(reminded_at) - julianday(placed_at)) * 86400"
    until(lambda: shop.query(f"SELECT 1 FROM {join} AND c.name = 'Dunn'"))
    assert shop.query(f"SELECT {waited} FROM {join} AND {waited} < 3.99") == [], "none too early"


def test_one_customers_orders_do_not_keep_the_others_waiting(shop):
    """Acme has placed its 40 orders first; all four customers have their turns."""
    shop.manage("open_shop")
    shop.start_worker("-P", "solo")
    until(lambda: shop.states() == {"paid": 45, "failed": 1}, say=shop.told)
    join = "shop_order JOIN shop_customer c ON c.id = customer_id WHERE paid_at IS NOT NULL"
    paid = [name for (name,) in shop.query(f"SELECT name FROM {join} ORDER BY paid_at")]
    assert Counter(paid) == {"Acme": 40, "Bell": 2, "Cole": 3}
    assert Counter(paid[:8]) == {"Acme": 3, "Bell": 2, "Cole": 3}, "no other customer waits for Acme's 40"


# -- a person ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path / "profile") as browser:
        browser.set_window_size(1180, 820)
        browser.implicitly_wait(10)
        yield browser


class Person:
    """Reads and clicks."""

    def __init__(self, browser, address):
        self.browser = browser
        self.address = address

    def see(self):
        return re.sub(r"\s+", " ", str(self.browser.find_element("tag name", "main").text))

    def expect(self, pattern):
        """Wait until the page shows it; a click returns before the next page is there."""
        from selenium.common.exceptions import WebDriverException

        def shown():
            with suppress(WebDriverException):  # the page is just being replaced
                return re.search(pattern, self.see()) is not None
            return False

        until(shown, say=self.see)

    def follow(self, text):
        """A link in the page itself, or else in the sidebar."""
        inside = self.browser.find_elements("xpath", f"//main//a[normalize-space()='{text}']")
        (inside or self.browser.find_elements("link text", text))[0].click()

    def press(self, label):
        button = self.browser.find_element("xpath", f"//main//button[.='{label}'] | //main//input[@value='{label}']")
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)  # not below the bar
        button.click()

    def write(self, name, text):
        self.browser.find_element("name", name).send_keys(text)

    def log_in(self):
        for name in ("username", "password"):
            self.write(name, "admin")
        self.browser.find_element("css selector", "input[type=submit]").click()

    def picture(self, path):
        self.browser.save_screenshot(path)


@on_sqlite
def test_no_page_is_wider_than_the_window_however_long_the_names(shop, browser, subtests):
    shop.manage("open_shop")
    shop.manage("shell", "-c", FILL)
    person = Person(browser, shop.start_server())
    browser.get(person.address)
    person.log_in()
    person.expect("Queues")
    for width in (1180, 400):
        with subtests.test(width=width):
            _fits(person, width)


def _fits(person, width):
    browser = person.browser
    metrics = {"width": width, "height": 820, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for page in ("", *(f"{each}?queue={LONG_QUEUE}" for each in ("queue", "keys", "messages"))):
        browser.get(f"{person.address}admin/celery_fdb/queue/{page}")
        person.expect("long")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
    task = browser.find_element("css selector", "#found tbody th a")
    browser.get(task.get_attribute("href"))
    person.expect("Message id")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


LONG_QUEUE = "a-long-name-of-a-queue.of-some-team.in-some-department.of-a-company.with-a-version-v2"
FILL = f"""
from django_shop import celery_app
name = "shop.tasks.a_task_with_quite_a_long_name_that_somebody_wrote_on_a_friday_afternoon"
celery_app.send_task(name, (1,), queue={LONG_QUEUE!r}, headers={{"fair_key": "a-long-key-" + 80 * "x"}})
"""


#: Dead letters of two causes, as workers would leave them, and none runs.
BURY = """
from celery_fdb.contrib.django.conf import lazy_broker
broker = lazy_broker.broker()
jobs = broker.queue("payments").take_many(5, 0)
for number, job in enumerate(jobs):
    job.bury(error=ValueError("no such order") if number < 3 else KeyError("card"))
"""


@on_sqlite
@pytest.mark.parametrize("width", [1180, 400])
def test_a_person_searches_edits_and_limits_in_the_browser(shop, browser, width):
    """By keyboard and mouse, on a wide and a narrow screen; no worker runs, so each thing stays where it is put."""
    shop.manage("open_shop")
    shop.manage("shell", "-c", BURY)
    person = Person(browser, shop.start_server())
    metrics = {"width": width, "height": 820, "deviceScaleFactor": 1, "mobile": width < 800}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    queues = f"{person.address}admin/celery_fdb/queue/"

    def fits():
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width

    def confirm(label, pattern):
        """The question that is shown, whose button has the action's label."""
        until(lambda: browser.find_elements("css selector", "form.question"))
        fits()
        person.press(label)
        person.expect(pattern)

    browser.get(queues)
    person.log_in()
    person.expect("Queues")

    browser.get(f"{queues}dead?queue=payments.dead")
    person.expect(r"ValueError: no such order .*failed .*3 .*KeyError: 'card' .*failed .*2 ")
    fits()
    browser.find_element("xpath", "//tr[contains(., 'KeyError')]//a[.='shop.tasks.charge']").click()
    person.expect("Dead letters of payments")
    assert len(browser.find_elements("css selector", "#found tbody tr")) == 2
    fits()
    person.press("Discard all")
    confirm("Discard all", r"Discarded 2 dead letters of payments\.dead")

    browser.get(f"{queues}messages?queue=payments.dead")
    person.follow("shop.tasks.charge")
    person.press("Edit and replay")
    until(lambda: browser.find_elements("css selector", "form.question"))
    arguments = browser.find_element("name", "args")
    assert "aria-describedby" in browser.execute_script("return arguments[0].outerHTML", arguments)
    arguments.clear()
    arguments.send_keys("[4711")
    person.press("Edit and replay")
    person.expect("args must be JSON")
    browser.find_element("name", "args").send_keys("]")
    confirm("Edit and replay", "Replayed 1 dead letter to payments with other arguments")

    browser.get(f"{queues}messages?queue=reminders&state=delayed")
    person.write("task", "shop.tasks.*")
    person.expect(r"looked at \d+")
    browser.find_element("css selector", "input[name=selected]").click()
    person.press("Run now")
    confirm("Run now", "Made 1 message of reminders ready")

    browser.get(f"{queues}keys?queue=payments&prefix=Ac")
    person.press("Set limits")
    person.expect("Messages per turn")
    person.write("rate", "30/m")
    confirm("Set limits", "Set the limits of key .Acme.*rate 0.5")
    person.expect("rate ≤ 0.5/s")
    fits()
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [each for each in errors if "favicon.ico" not in each and "422" not in each] == []


def test_a_person_replays_a_failed_payment_in_the_browser(shop, browser):
    shop.manage("open_shop")
    shop.start_worker()
    person = Person(browser, shop.start_server())
    until(lambda: shop.states() == {"paid": 45, "failed": 1}, say=shop.told)

    browser.get(person.address)
    person.log_in()

    person.follow("Queues")
    person.expect(r"payments 0 0 0 1 ")
    person.expect(r"reminders 0 0 46 0 ")
    until(lambda: browser.find_elements("css selector", "td.trend path") or browser.refresh())

    person.follow("Dead letters")
    person.follow("payments.dead")
    person.expect("oldest first")
    person.follow("shop.tasks.charge")
    person.expect(r"in payments failed .*shop\.tasks\.CardDeclined: the card of Dunn was declined .* Key Dunn")
    if "ADMIN_PICTURE" in os.environ:
        person.picture(os.environ["ADMIN_PICTURE"])
    person.follow("Show the body")
    person.expect('"callbacks": null')
    letter = browser.current_url

    browser.get(f"{person.address}admin/shop/customer/")
    boxes = browser.find_elements("css selector", "input[name$=card_works]")
    (unticked,) = [each for each in boxes if not each.is_selected()]
    unticked.click()
    person.press("Save")
    person.expect("changed successfully")

    browser.get(letter)
    person.press("Replay")
    person.expect("each to the queue it died in")
    assert shop.states()["failed"] == 1
    person.press("Replay")
    person.expect("Replayed 1 dead letter to payments: shop.tasks.charge")
    until(lambda: shop.states() == {"paid": 46}, say=shop.told)

    assert shop.query("SELECT object_id, change_message FROM django_admin_log ORDER BY id DESC LIMIT 1")[0][0] == (
        "payments.dead"
    )
    browser.get(f"{person.address}admin/")
    person.follow("payments.dead")
    person.expect("There is no queue “payments.dead”")  # its last letter is gone
    browser.get(f"{person.address}admin/celery_fdb/queue/payments.dead/history/")
    person.expect(r"admin Replayed 1 dead letter to payments: shop\.tasks\.charge [\w-]{36}")
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [each for each in errors if "favicon.ico" not in each and "queue=payments.dead" not in each] == []
