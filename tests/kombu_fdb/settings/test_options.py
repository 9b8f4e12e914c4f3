import dataclasses
import logging
import pickle
import re
from pathlib import Path

import pytest

from kombu_fdb.errors import OptionError
from kombu_fdb.settings import options
from kombu_fdb.settings.options import Options, options_table, parse_options

PAGE = Path(__file__).parents[3] / "docs" / "options.md"


def test_defaults_are_valid_and_frozen():
    given = parse_options()
    assert given == Options()
    assert given.session_ttl == 30.0
    assert given.sweep_interval == 5.0
    assert given.max_message_size == 8 * 1024 * 1024
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.session_ttl = 1.0
    assert pickle.loads(pickle.dumps(given)) == given


def test_whole_numbers_of_seconds_become_floats():
    assert repr(parse_options({"session_ttl": 60}).session_ttl) == "60.0"


def test_a_path_object_names_the_cluster_file():
    assert parse_options({"cluster_file": Path("/etc/x.cluster")}).cluster_file == "/etc/x.cluster"


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("session_ttl", "30", "session_ttl takes a number of seconds from 0.5 to 86,400."),
        ("session_ttl", True, "session_ttl takes a number of seconds from 0.5 to 86,400."),
        ("session_ttl", float("nan"), "session_ttl takes a number of seconds from 0.5 to 86,400."),
        ("session_ttl", float("inf"), "session_ttl takes a number of seconds from 0.5 to 86,400."),
        ("session_ttl", None, "session_ttl takes a number of seconds from 0.5 to 86,400."),
        ("session_ttl", 0, "session_ttl takes a number of seconds from 0.5 to 86,400."),
        ("max_message_size", 10**8, "max_message_size takes a whole number of bytes from 1,024 to 9,000,000."),
        ("claim_window", 1.5, "claim_window takes a whole number of messages from 1 to 1,000."),
        ("delivery_limit", 0, "delivery_limit takes a whole number of redeliveries from 1 to 65,535, or None."),
        ("synchronous", "off", "synchronous takes 'normal' or 'full'."),
        ("synchronous", ["full"], "synchronous takes 'normal' or 'full'."),
        ("priority_order", 9, "priority_order takes 'amqp' or 'redis'."),
        ("namespace", "", "namespace takes a non-empty string of at most 255 bytes, or None."),
        ("namespace", "é" * 128, "namespace takes a non-empty string of at most 255 bytes, or None."),
        ("fair_key", len, "fair_key takes a non-empty string of at most 255 bytes, or None."),
    ],
)
def test_an_unusable_value_names_what_is_accepted(name, value, advice):
    with pytest.raises(OptionError) as caught:
        parse_options({name: value})
    assert caught.value.name == name
    assert caught.value.fix == advice
    assert f"value: {value!r}"[:50] in str(caught.value)


def test_no_delivery_limit():
    assert parse_options({"delivery_limit": None}).delivery_limit is None


@pytest.mark.parametrize(
    ("name", "advice", "suggestion"),
    [
        ("sesion_ttl", r"unknown option .*Did you mean session_ttl\?", "session_ttl"),
        (
            "visibilty_timeout",
            r"Did you mean visibility_timeout\?",
            "visibility_timeout",
        ),  # publish_timeout is near, too
        ("visibility_timeot", "unknown option", "visibility_timeout"),
        ("qqqq", r"Known options: ack_delay_ms, .*, synchronous", None),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_known_one(name, advice, suggestion):
    with pytest.raises(OptionError, match=advice) as caught:
        parse_options({name: 30})
    assert caught.value.suggestion == suggestion


def test_a_sweep_too_slow_for_the_ttl_is_a_contradiction():
    with pytest.raises(OptionError, match=r"sweep_interval to at most 2\.5, or raise session_ttl"):
        parse_options({"session_ttl": 10, "sweep_interval": 3})


@pytest.mark.parametrize("ttl", [0.5, 1, 6, 29, 30, 300])
def test_the_sweep_follows_a_ttl_that_is_set_alone(ttl):
    given = parse_options({"session_ttl": ttl})
    assert given.sweep_interval == pytest.approx(min(5, ttl / 6))


def test_fallbacks_hold_unless_set():
    assert parse_options({}, connect_timeout=4).connect_timeout == 4.0
    assert parse_options({}, connect_timeout=None).connect_timeout == 5.0
    assert parse_options({"connect_timeout": 7}, connect_timeout=4).connect_timeout == 7.0


def test_names_that_kombu_puts_into_the_same_dict_pass_silently(caplog):
    """``Producer.publish(retry=True)`` merges its policy into ``transport_options``."""
    caplog.set_level(logging.DEBUG)
    policy = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 1, "timeout": 1}
    kombu = {"connect_retries_timeout": 5, "errback": print, "callback": print, "body_encoding": "base64"}
    celery = {"deadletter_queue": "x", "polling_interval": 1, "retry_errors": None, "confirm_publish": True}
    assert parse_options(policy | kombu | celery) == Options()
    assert not caplog.records


@pytest.fixture
def _nothing_said_yet():
    options._tell_once.cache_clear()
    yield
    options._tell_once.cache_clear()


@pytest.mark.usefixtures("_nothing_said_yet")
def test_visibility_timeout_is_ignored_with_one_line_that_says_why(caplog):
    caplog.set_level(logging.INFO, logger="kombu_fdb.settings.options")
    for _ in range(3):
        assert parse_options({"visibility_timeout": 43200}) == Options()
    (line,) = caplog.messages
    assert "visibility_timeout" in line
    assert "not needed" in line


@pytest.mark.usefixtures("_nothing_said_yet")
def test_options_of_other_transports_do_not_break_a_failover_list(caplog):
    caplog.set_level(logging.INFO, logger="kombu_fdb.settings.options")
    assert parse_options({"socket_keepalive": True, "predefined_queues": {}}) == Options()
    assert [name in line for name, line in zip(("socket_keepalive", "predefined_queues"), caplog.messages, strict=True)]


@pytest.mark.parametrize(
    "name", ["client_properties", "frame_max", "channel_max", "on_blocked", "client_name", "consumer_arguments"]
)
def test_options_of_other_transports_pass(name):
    assert parse_options({name: None}) == parse_options()


def test_no_option_takes_a_name_that_kombu_uses():
    ours = {each.name for each in dataclasses.fields(Options)}
    assert not ours & (options._KOMBU | options._FOREIGN)


def test_the_page_has_the_table_of_options():
    shown = re.search(r"<!-- options -->\n(.*?)<!-- /options -->", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1] == options_table(), "paste the output of: python -m kombu_fdb.settings.options"
