"""The dashboard in a real browser, over a shop with a real worker: what a person sees, and how they get around."""

import importlib.util
import os
import re
from collections import Counter
from pathlib import Path
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import pytest
from celery import _state
from kit.browser import NARROW, WIDE, Window
from kit.processes import Programs, until

from kombu_fdb import Broker

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
AXE = HERE / "axe" / "axe-core-4.14.1.min.js"

pytestmark = [pytest.mark.process, pytest.mark.timeout(1200), pytest.mark.xdist_group("dashboard in a browser")]


class Shop(Programs):
    """Its broker, and its processes."""

    def __init__(self, directory):
        self.url = f"fdb+sqlite:///{directory}/broker.db"
        spec = importlib.util.spec_from_file_location("shop", HERE / "shop.py")
        assert spec.loader is not None
        self.tasks = importlib.util.module_from_spec(spec)
        shared = set(_state._on_app_finalizers)
        with patch.dict(os.environ, SHOP_BROKER=self.url):  # and no longer: programs of other tests read it, too
            spec.loader.exec_module(self.tasks)
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}
        _state._on_app_finalizers &= shared  # its tasks are for no app of another test, which may come in between
        super().__init__(directory, environ)

    def start_worker(self):
        options = ("-c", "4", "-P", "threads", "-l", "INFO", "-n", "worker1@shop")
        queues = ("-Q", "orders,payments,mails,renders,reports")
        log = self.start("worker", "-m", "celery", "-A", "shop", "worker", *options, *queues)
        until(lambda: " ready." in log.read_text(), say=log.read_text)

    def start_dashboard(self, *options):
        """Its address."""
        log = self.start("web", "-m", "celery", "-A", "shop", "fdb", "web", "--port", "0", *options)
        found = until(lambda: re.search(r"http://127\.0\.0\.1:\d+", log.read_text()), say=log.read_text)
        return str(found[0])


@pytest.fixture(scope="session")  # to start it takes five seconds, and these tests stand between others
def shop(tmp_path_factory):
    """Some orders are done, some wait, three payments have failed, a queue is paused and a key is limited."""
    shop = Shop(tmp_path_factory.mktemp("shop"))
    with Broker.open(shop.url) as broker:
        shop.start_worker()
        for number in range(24):
            shop.tasks.order(number)
        shop.tasks.catalogue(6)
        until(lambda: broker.queue("payments.dead").count() and not broker.queue("payments").count())
        broker.queue("mails").pause()
        broker.queue("payments").limit("acme", rate=5.0, max_in_flight=2)
        for number in range(30):
            shop.tasks.mail.apply_async((number, "hooli"), headers={"fair_key": "hooli"})
        yield shop
        shop.stop()
        shop.tasks.app.pool.force_close_all()
        shop.tasks.app.close()


@pytest.fixture(scope="session")
def address(shop):
    return shop.start_dashboard("--write", "--show-bodies")


@pytest.fixture
def window(chromium, address):
    window = Window(chromium, address)
    window.look()
    window.complaints()
    return window


def workflow(window):
    """The id of one, as soon as it is in the history."""
    window.open("/workflows")
    until(lambda: window.browser.find_elements("css selector", "tbody a") or window.browser.refresh())
    return parse_qs(urlsplit(window.find("tbody a").get_attribute("href")).query)["id"][0]


def pages(window):
    root = workflow(window)
    window.open("/messages", queue="payments.dead")
    spot = window.find("input[name=selected]").get_attribute("value")
    return [
        ("/", {}),
        ("/queues", {}),
        ("/queue", {"queue": "payments"}),
        ("/keys", {"queue": "mails"}),
        ("/keys", {"queue": "payments"}),
        ("/messages", {"queue": "mails"}),
        ("/messages", {"queue": "payments.dead"}),
        ("/message", {"queue": "payments.dead", "spot": spot, "body": "1"}),
        ("/dead", {}),
        ("/dead", {"queue": "payments.dead"}),
        ("/causes", {}),
        ("/task", {"id": "x"}),
        ("/task", {"id": root}),
        ("/tasks", {}),
        ("/runs", {}),
        ("/workflows", {}),
        ("/workflow", {"id": root}),
        ("/schedules", {}),
        ("/workers", {}),
        ("/sessions", {}),
        ("/login", {}),
        ("/nowhere", {}),
    ]


#: A page, the queue it is about, and the action of which it asks for more.
QUESTIONS = [
    ("/queue", "payments", "publish"),
    ("/queue", "payments", "purge"),
    ("/keys", "payments", "limit"),
    ("/messages", "payments.dead", "edit"),
]


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_each_page_is_accessible_and_fits(window, size):
    """axe-core finds nothing, targets are 24 px or apart, nothing is too wide or breaks the policy."""
    for path, query in pages(window):
        window.open(path, **query)
        check(window, size, f"{path} {query}")
    for path, queue, action in QUESTIONS:
        window.open(path, queue=queue)
        for box in window.browser.find_elements("css selector", "input[name=selected]")[:1]:
            box.click()
        window.find(f"button[value={action}]").click()
        window.wait_for("main form", "Go back")
        check(window, size, f"{path} {action}")
    assert not [each for each in window.complaints() if "/nowhere" not in each["message"]]


#: What of a table, and which buttons, stand where one has to scroll sideways to see them.
OUTSIDE = """return [...document.querySelectorAll("table.data :is(th, td), main button")]
    .filter((each) => each.getClientRects().length && each.getBoundingClientRect().right > innerWidth + 1)
    .map((each) => each.outerHTML.slice(0, 200))"""


def check(window, size, what):
    """The dark theme changes nothing but colors."""
    window.look(size)
    assert window.run("return document.documentElement.scrollWidth") <= size[0], what
    assert size != NARROW or not window.run(OUTSIDE), what
    window.run(AXE.read_text())
    found = violations(window)
    window.look(size, "dark")
    found += violations(window, "color-contrast")
    bad = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found]
    assert not bad, what


def test_axe_finds_what_is_wrong(window):
    window.open("/nowhere")
    window.run(
        "const main = document.querySelector('main');"
        "main.innerHTML += '<img src=x><button></button>' + '<button class=small>x</button>'.repeat(9);"
        "for (const each of main.querySelectorAll('.small')) { each.style.all = 'unset'; each.style.fontSize = '9px'; }"
    )
    window.run(AXE.read_text())
    assert {"image-alt", "button-name", "target-size"} <= {each["id"] for each in violations(window)}


def violations(window, rule=""):
    """Those of the one rule; of all if none is named."""
    options = {"resultTypes": ["violations"], "rules": {"target-size": {"enabled": True}}}
    if rule:
        options["runOnly"] = [rule]
    return window.browser.execute_async_script(
        "axe.run(document, arguments[0]).then((each) => arguments[1](each.violations));", options
    )


def test_the_overview_is_live(window, shop):
    """Numbers, trend and charts change by themselves, and the page says whether they do."""
    window.open("/")
    window.wait_for("#live", "^live$")
    with Broker.open(shop.url) as broker:
        before = broker.queue("mails").count()
        assert window.text('tr[data-queue="mails"] [data-field="ready"]') == str(before)
        broker.queue("mails").put("x", key="wonka")
        window.wait_for('tr[data-queue="mails"] [data-field="ready"]', f"^{before + 1}$")
        window.run("document.body.dataset.mine = '1'")
        alert = "mails is paused with"
        assert alert in window.text("#alerts")
        broker.queue("mails").resume()
        until(lambda: alert not in window.text("#alerts"))
        until(lambda: not window.find('tr[data-queue="mails"] .tag').is_displayed())
        broker.queue("mails").pause()
        broker.queue("mails").put("x", key="wonka")
        window.wait_for("#alerts", alert)
        assert window.find("#alerts li:last-child a").get_attribute("href").startswith(f"{window.address}/queue?queue=")
    assert window.run("return document.body.dataset.mine") == "1", "without loading the page again"
    window.wait_for('tr[data-queue="mails"] [data-field="consumers"]', "^1$")
    assert not window.complaints()


def test_charts_are_there_for_who_comes_first(window, shop):
    """They are of what the workers have written, without a script, and each period has its own."""
    with Broker.open(shop.url) as broker:
        until(lambda: len(broker.inspect.samples("hour")) > 1)

    def drawn():
        window.open("/")
        return len(window.browser.find_elements("css selector", "figure svg")) == 5

    until(drawn)  # the workers write each run after a moment
    titles = [each.text.split("\n")[0] for each in window.browser.find_elements("css selector", "figcaption")]
    assert len(titles) == 5
    assert window.find('figure svg path.line[d^="M"]')
    assert window.find("tr[data-queue=mails] .trend path").get_attribute("d")
    window.find(".tabs a[href*=week]").click()
    until(lambda: "span=week" in window.find(".tabs a[aria-current]").get_attribute("href"))
    window.open("/queue", queue="payments")
    assert len(window.browser.find_elements("css selector", "figure")) == 3
    assert not window.complaints()


#: What a person can act on; and what of it has the focus, whether that is seen, and whether the page has been left.
STOPS = """return [...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']")]
    .filter((each) => each.checkVisibility({ visibilityProperty: true }) && !each.disabled && each.type !== "hidden")
    .map((each) => each.outerHTML.slice(0, 200))"""
FOCUS = """const each = document.activeElement, style = getComputedStyle(each), box = each.getBoundingClientRect();
    const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0
        && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
    return [each.outerHTML.slice(0, 200), isSeen, each === document.body]"""


def test_all_of_each_page_is_reached_by_keyboard(window):
    """By Tab, whatever one can act on, one after the other, to the end and out again; and one sees where one is."""
    from selenium.webdriver import Keys

    for path, query in pages(window):
        window.open(path, **query)
        stops, found, unseen = window.run(STOPS), Counter[str](), []
        assert stops
        is_within = not window.run(FOCUS)[2]  # a page may begin in one of its fields, and is then left and begun anew
        for _ in range(4 * len(stops) + 20):  # a date has a stop for each of its parts
            window.press(Keys.TAB)
            stop, is_seen, has_left = window.run(FOCUS)
            if has_left and not is_within:
                break
            if has_left:
                is_within = False
                continue
            found[stop] += 1
            unseen += [] if is_seen else [stop]
        else:
            pytest.fail(f"{path} {query}: Tab does not leave the page")
        assert (list(Counter(stops) - found), unseen) == ([], []), f"{path} {query}"


#: Of the part that reads itself again, whether there are rows in it or not.
TAKE_FOCUS = "const found = document.querySelector('#found'); found.tabIndex = -1; found.focus();"


def test_what_has_the_focus_stays_where_a_page_reads_itself_again(window):
    window.open("/sessions")
    window.run(TAKE_FOCUS)
    window.run("document.addEventListener('htmx:beforeRequest', () => { document.body.dataset.asked = 'yes'; })")
    until(lambda: window.run("return document.body.dataset.asked"))
    until(lambda: not window.run("return document.querySelector('.htmx-request')"))
    assert window.run("return document.activeElement.id") == "found"


def test_what_gets_the_focus_while_the_answer_is_on_its_way_keeps_it(window):
    window.open("/sessions")
    window.run(f"""document.addEventListener("htmx:beforeSend", () => {{ {TAKE_FOCUS} }});
        document.addEventListener("htmx:afterRequest", () => {{ document.body.dataset.answered = "yes"; }})""")
    until(lambda: window.run("return document.body.dataset.answered"))
    assert window.run("return document.activeElement.id") == "found"


def test_all_is_reached_by_keyboard(window):
    from selenium.webdriver import Keys

    window.open("/messages", queue="payments.dead")
    window.press(Keys.TAB)
    assert window.focused.text == "Skip to content"
    window.press(Keys.ENTER)
    assert window.run("return document.activeElement.id") == "main"
    for _ in range(40):
        window.press(Keys.TAB)
        if window.focused.get_attribute("name") == "selected":
            break
    window.press(" ")
    assert window.text("#selected") == "1"
    outline = window.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "the focus is seen"
    window.press(*[Keys.SHIFT + Keys.TAB] * 2)
    for _ in range(40):
        window.press(Keys.TAB)
        if window.focused.tag_name == "button" and window.focused.text == "Replay":
            break
    assert window.run("return document.querySelector('button[value=replay]').disabled") is False


def test_why_a_message_died_and_what_it_says_is_seen_at_once(window):
    """Its body, where that may be shown, its error and its traceback stand above all that it has besides."""
    window.open("/messages", queue="payments.dead")
    window.find("tbody th a").click()
    window.wait_for("#body", "Body")
    window.find('a[href$="#body"]').click()
    window.wait_for("#body + pre", r"\[")
    for what in ("#body + pre", "section[aria-label=Death] strong", "section[aria-label=Death] pre"):
        shown = window.run("return document.querySelector(arguments[0]).getBoundingClientRect().bottom + scrollY", what)
        assert 0 < shown < WIDE[1], what
    assert "in pay" in window.text("section[aria-label=Death] pre")


def test_a_person_replays_a_dead_letter(window, shop):
    with Broker.open(shop.url) as broker:
        before = broker.queue("payments.dead").count()
        window.open("/messages", queue="payments.dead")
        window.find("input[name=selected]").click()
        window.find("button[value=replay]").click()
        window.wait_for("main", "Replay 1 message, each to the queue it died in")
        window.find("button[value=replay]").click()
        window.wait_for(".notice", "Replayed 1 dead letter")
        until(lambda: broker.queue("payments.dead").count() == before, say=lambda: "it dies again")


def test_a_worker_is_asked_and_answers(window):
    window.open("/workers")
    window.wait_for("main", "worker1@shop")
    window.find("button[value=worker_rate]").click()
    window.wait_for("main", "Limit how often worker1@shop runs a task")
    window.find("input[name=task]").send_keys("shop.report")
    window.find("input[name=rate]").clear()
    window.find("input[name=rate]").send_keys("100/m")
    window.find("button[value=worker_rate]").click()
    window.wait_for(".notice", "new rate limit set successfully")


def test_a_workflow_is_a_tree(window):
    workflow(window)
    window.find("tbody a").click()
    window.wait_for("main", "shop.render")


def test_typing_filters_without_a_button(window):
    window.open("/queues")
    window.find("input[name=q]").send_keys("pay")
    until(lambda: window.run("return document.querySelectorAll('tbody tr').length") == 1)
    assert "q=pay" in window.browser.current_url
    assert window.run("return document.activeElement.name") == "q", "one can type on"
    assert not window.complaints()


@pytest.fixture
def berlin(window):
    window.browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Europe/Berlin"})
    yield
    window.browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


PICKED = "input[type=datetime-local]"
CHOOSE = """const each = document.querySelector(arguments[0]);
    each.value = arguments[1];
    each.dispatchEvent(new Event("input", { bubbles: true }))"""


@pytest.mark.usefixtures("berlin")
def test_times_to_filter_by_are_in_the_zone_of_the_table_and_addresses_in_utc(window, shop):
    """Also of the hour that a day has twice: what was not chosen anew stays the moment that it was."""
    for hour, zone in (("00", "GMT+2"), ("01", "GMT+1")):
        window.open("/runs", since=f"2026-10-25T{hour}:30:15Z")
        assert window.find(PICKED).get_attribute("value") == "2026-10-25T02:30"
        assert zone in window.text("label:has(input[type=datetime-local])")
        window.find("input[name=task]").send_keys("shop.pay")
        until(lambda: "task=shop.pay" in window.browser.current_url)
        (since,) = parse_qs(urlsplit(window.browser.current_url).query)["since"]
        assert since == f"2026-10-25T{hour}:30:15.000Z"
        window.wait_for("tbody time", "GMT[+]1")
    for path, query in (("/runs", {}), ("/workflows", {}), ("/messages", {"queue": "mails"})):
        window.open(path, **query)
        window.run(CHOOSE, PICKED, "2026-07-01T12:00")
        until(lambda: "since=2026-07-01T10%3A00%3A00.000Z" in window.browser.current_url)
        window.browser.refresh()
        assert window.find(PICKED).get_attribute("value") == "2026-07-01T12:00"
        assert "GMT+2" in window.text("label:has(input[type=datetime-local])")


def test_a_year_that_no_moment_has_can_not_be_typed(window):
    """The address would keep the moment before, and the field show another."""
    window.open("/runs")
    window.find(PICKED).send_keys("0101120261")
    window.find(PICKED).send_keys("0100AM")
    until(lambda: window.find(PICKED).get_attribute("value"))
    assert len(window.find(PICKED).get_attribute("value")) == len("2026-01-01T01:00")
    assert not window.complaints()


@pytest.mark.usefixtures("berlin")
def test_a_message_is_due_when_the_reader_chose(window, shop):
    with Broker.open(shop.url) as broker:
        broker.queue("mails").put("x", delay=3_600)
        window.open("/messages", queue="mails", state="delayed")
        window.find("#select-all").click()
        window.find("button[value=reschedule]").click()
        window.wait_for("main form", "Due, GMT")
        window.run(CHOOSE, PICKED, "2041-05-05T12:00")
        window.find("button[value=reschedule]").click()
        window.wait_for(".notice", "to 2041-05-05 10:00:00 UTC")


@pytest.mark.usefixtures("berlin")
def test_a_chart_says_in_which_zone_its_times_are(window):
    window.open("/queue", queue="payments")
    until(lambda: window.browser.find_elements("css selector", ".plot") or window.browser.refresh())
    zone = window.text("#live time") or window.run("return document.querySelector('.plot [data-zone]').textContent")
    assert re.search(r"GMT\+[12]", zone)
    assert window.text(".plot [data-zone]") in {"GMT+1", "GMT+2"}


def test_the_theme_is_chosen_and_kept(window):
    window.look(theme="light")
    window.open("/")
    light = window.run("return getComputedStyle(document.body).backgroundColor")
    window.find("#theme").click()
    dark = window.run("return getComputedStyle(document.body).backgroundColor")
    assert light != dark
    window.open("/queues")
    assert window.run("return getComputedStyle(document.body).backgroundColor") == dark
    window.run("localStorage.clear()")
