"""Tables in terminals of any width."""

import click
import pytest
from click.testing import CliRunner
from kit.left import keep
from kombu.connection import Connection
from rich.console import Console

from celery_fdb.cli import HOMES, fdb
from celery_fdb.cli.terminal import table
from celery_fdb.history.run import Run
from kombu_fdb import Broker
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.primitives.ranges import MOST

ID = "d5703c1b-3a56-4471-b347-2101a1620075"
ROWS = [
    ("shop.tasks.charge", ID, "FAILURE", "32 s ago", "payments", "acme", "celery@web-1", "CardDeclined: no money"),
    ("shop.tasks.mail", ID[::-1], "SUCCESS", "33 s ago", "mails", "", "celery@web-1", ""),
]


def shown(width):
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table("task id state >ended queue key worker error", ROWS))
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80])
def test_no_cell_is_torn_in_a_narrow_terminal(width):
    lines = shown(width)
    assert max(map(len, lines)) <= width
    for cell in (each for row in ROWS for each in row):
        assert any(cell in line for line in lines), cell
    assert any("key acme" in line for line in lines), "a cell has its heading"
    assert sum("key" in line for line in lines) == 1, "an empty one is left out"


def test_what_fits_is_a_table():
    heading, *rows = shown(200)
    assert heading.split()[:3] == ["task", "id", "state"]
    assert len(rows) == len(ROWS)


def test_a_table_without_rows_says_so():
    console = Console(width=40)
    with console.capture() as captured:
        console.print(table("a b", []))
    assert captured.get() == "(none)\n"


def test_what_is_longer_than_a_line_goes_on_in_the_next():
    console = Console(width=40)
    with console.capture() as captured:
        console.print(table("a b", [("x", "y" * 100)]))
    assert captured.get().count("y") == 100


QUEUE, KEY, TASK = "payments.europe-west", "customer-of-the-month", "shop.tasks.payments.charge_customer"
#: Each command that shows what is stored, as it is called. What others print is a sentence, JSON, or a page of metrics.
SHOWN = [
    ("status",),
    ("top", "--once", "--keys", "3"),
    ("queues",),
    ("queues", "--all"),
    ("keys", QUEUE),
    ("sessions",),
    ("peek", QUEUE),
    ("find", ID),
    ("search", QUEUE),
    ("history",),
    ("task", ID),
    ("limit", QUEUE, KEY),
    ("dead", "list"),
    ("dead", "list", QUEUE),
    ("dead", "causes", QUEUE),
    ("doctor",),
]


@pytest.fixture
def shop(broker, url):
    """Long names, a dead letter, a session, limits and a history."""
    headers = {"id": ID, "task": TASK, "argsrepr": "('an argument',)", "kwargsrepr": "{}", "fair_key": KEY}
    with Connection(url) as connection:
        producer = connection.Producer()
        for _ in range(3):
            producer.publish([], routing_key=QUEUE, headers=headers, declare=[connection.SimpleQueue(QUEUE).queue])
    jobs = broker.queue(QUEUE)
    jobs.limit(KEY, rate=1e6, max_in_flight=7)  # peek shows what a consumer would get now
    jobs.take(0).bury(error=ConnectionResetError("the service of the bank did not answer within 30 s"))
    now_ms = Clock().wall_ms()
    ran = Run(
        ID, TASK, QUEUE, "celery@worker-in-europe-west", "FAILURE", now_ms - 9, now_ms, 0.009, key=KEY, error="no money"
    )
    keep(broker, ran)


@pytest.mark.parametrize("columns", [60, 80])
def test_no_command_prints_a_line_that_is_wider_than_the_terminal(shop, run, monkeypatch, columns):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich then takes the output for a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "1000")
    whole = {command: click.unstyle(run(*command).out) for command in SHOWN}
    monkeypatch.setenv("COLUMNS", str(columns))
    for command, out_of_wide in whole.items():
        out = click.unstyle(run(*command).out)
        assert [line for line in out.splitlines() if len(line) > columns] == [], command
        assert out, command
        torn = [each for each in (ID, QUEUE, KEY, TASK) if each in out_of_wide and each not in out]
        assert torn == [], command


def test_a_program_reads_a_table_of_one_line_a_row(shop, broker, run):
    """However long one is: what a pipe takes has no width."""
    name = "q" * 250
    broker.queue(name).put(b"x")
    headings, *rows = run("queues").out.splitlines()
    assert headings.split()[:2] == ["queue", "ready"]
    assert sorted(row.split()[0] for row in rows) == [QUEUE, name]


def test_a_task_that_raised_has_failed_and_of_what(shop, run):
    """AMQP's word for it, which filters take, is rejected."""
    told = "failed: ConnectionResetError: the service of the bank did not answer within 30 s"
    assert f"died: {told}" in run("dead", "list", QUEUE).out
    assert told.partition(": ")[2] in run("dead", "causes", QUEUE).out
    assert run("dead", "list", QUEUE, "--by", "reason").out.split()[-2:] == ["failed", "1"]
    assert f"failed in {QUEUE}" in run("dead", "show", QUEUE, ID).out
    assert f"in {QUEUE}: failed" in run("task", ID).out


@pytest.mark.parametrize("columns", [60, 80])
def test_no_help_is_wider_than_the_terminal(columns):
    for name in [*HOMES, "dead replay", "dead list"]:
        shown = CliRunner().invoke(fdb, [*name.split(), "--help"], terminal_width=columns, max_content_width=columns)
        assert [line for line in shown.stdout.splitlines() if len(line) > columns] == []
        assert str(MOST) not in shown.stdout, "a bound that is none to a person"


def test_a_terminal_without_a_letter_gets_its_code(url):
    with Broker.open(url) as broker:
        broker.queue("grün").put("job")
    result = CliRunner(charset="ascii").invoke(fdb, ["--broker", url, "queues"])
    assert r"gr\xfcn" in result.stdout
