"""The same value is accepted or refused alike wherever it comes in: one rule for each kind of value."""

import math
import random
from decimal import Decimal
from unittest.mock import MagicMock

import click
import pytest
from click.testing import CliRunner

from celery_fdb.cli.status import Seconds
from celery_fdb.operations.queues import read_limit, read_rate
from celery_fdb.tasks.task import FdbTask
from kombu_fdb.api.dead_letters import DeadLetters
from kombu_fdb.api.queue import positive_ms, publication
from kombu_fdb.engine.scheduling.limit_changes import check_limits
from kombu_fdb.errors import InvalidArgument, KombuFDBError
from kombu_fdb.model import KeyLimits
from kombu_fdb.primitives.ranges import LONGEST_S, MOST, SHORTEST_S, rate_of
from kombu_fdb.settings.options import Options
from kombu_fdb.transport.envelope import dedup_of

rng = random.Random(1)
NUMBERS = [
    *(True, False, -1, 0, 1, 9, 10, 255, 2**31, 2**53 - 1, 2**53, 2**64, 10**400, 0.0, SHORTEST_S, LONGEST_S),
    *(
        SHORTEST_S / 2,
        LONGEST_S + 1,
        1e-300,
        1e300,
        math.inf,
        -math.inf,
        math.nan,
        5.0,
        Decimal(5),
        b"5",
        [],
        {},
        object(),
    ),
    *(rng.randint(-20, 600) for _ in range(200)),
    *(10 ** rng.uniform(-12, 20) for _ in range(200)),
]
TEXTS = [
    *(
        "",
        "5",
        " 5",
        "+5",
        "-5",
        "5.0",
        "1e3",
        "1_0",
        "inf",
        "nan",
        "5/s",
        "5/m",
        "5/h",
        "5/d",
        "5/",
        "/s",
        "5/x",
        "0/s",
    ),
    *("".join(rng.choice("0123456789.+-e/smhd ") for _ in range(rng.randint(1, 6))) for _ in range(500)),
]


def accepts(check, value):
    try:
        check(value)
    except KombuFDBError:
        return False
    return True


def task(**options):
    return type("Charge", (FdbTask,), {"name": "charge", **options})


def header(window):
    dedup_of({"dedup_id": "order-5", "dedup_window": window}, {}, 300)


PAIRS = {
    "a priority": (
        lambda value: publication(Options(), "q", b"", key="", delay=0, priority=value, ttl=None, ttr=None),
        lambda value: check_limits(KeyLimits(priority=value)),
    ),
    "a rate": (
        lambda value: DeadLetters(MagicMock(), "q.dead").replay(0, rate=value),
        lambda value: check_limits(KeyLimits(rate=value)),
    ),
    "messages in flight": (
        lambda value: task(max_in_flight=value),
        lambda value: check_limits(KeyLimits(max_in_flight=value)),
    ),
    # A header may be any spelling of a number, as other programs write them.
    "a window": (
        lambda value: task(dedup_window=value),
        lambda value: header(value if isinstance(value, int | float) else "none"),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_number_is_accepted_at_both_entrances_or_at_none(kind):
    found = [[accepts(check, value) for value in NUMBERS] for check in PAIRS[kind]]
    assert set(found[0]) == {True, False}
    assert [value for value, one, other in zip(NUMBERS, *found, strict=True) if one is not other] == []


def test_a_rate_in_words_is_accepted_at_both_entrances_or_at_none():
    found = [[accepts(check, text) for text in TEXTS] for check in (read_rate, lambda text: task(rate_limit_key=text))]
    assert set(found[0]) == {True, False}
    assert [text for text, one, other in zip(TEXTS, *found, strict=True) if one is not other] == []


@pytest.mark.parametrize(
    "text", ["0", "0/s", "-1", "nan", "inf/s", "-inf", "1e300/s", f"{0.9 / LONGEST_S}", "10/w", "ten", ""]
)
def test_a_rate_is_in_its_range(text):
    assert rate_of(text) is None


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "0", "1e300", "five"])
def test_seconds_on_a_command_line_are_in_their_range(text):
    command = click.command(click.option("--interval", type=Seconds(0.1, 3600))(lambda interval: None))
    assert CliRunner().invoke(command, ["--interval", "0.1"]).exit_code == 0
    assert CliRunner().invoke(command, ["--interval", text]).exit_code == 2


@pytest.mark.parametrize("given", ["five", "+5", str(MOST + 1)])
def test_a_form_tells_the_largest_limit_that_there_is(given):
    with pytest.raises(InvalidArgument, match=f"From 0 to {MOST:,}"):
        read_limit("capacity", given)


@pytest.mark.parametrize("given", [0, -1, True, math.nan, math.inf])
def test_a_time_that_may_not_be_zero_is_not_asked_for_as_zero_or_more(given):
    with pytest.raises(InvalidArgument, match="ttl must be more than 0 seconds"):
        positive_ms("ttl", given)
