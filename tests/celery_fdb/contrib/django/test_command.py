"""``manage.py fdb`` gets this project's broker; the command line's own behaviour is tested in ``tests/cli``."""

import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command, get_commands, load_command_class

from kombu_fdb import Broker


def run(*arguments):
    """As from the shell; the exit code."""
    command = load_command_class(get_commands()["fdb"], "fdb")
    with pytest.raises(SystemExit) as end:
        command.run_from_argv(["manage.py", "fdb", *arguments])
    return end.value.code


@pytest.mark.parametrize("djangos", [[], ["--settings=x"], ["--settings", "x", "--pythonpath", "y"]])
def test_it_shows_the_broker_of_the_settings(broker, capsys, djangos):
    broker.queue("orders").put(b"x")
    for arguments in ([*djangos, "queues", "--json"], ["queues", *djangos, "--json"], ["queues", "--json", *djangos]):
        assert run(*arguments) == 0
        assert "orders" in capsys.readouterr().out


def test_call_command(broker, capsys):
    broker.queue("orders").put(b"x")
    call_command("fdb", "queues", "--json")
    assert any(each["name"] == "orders" for each in json.loads(capsys.readouterr().out))
    with pytest.raises(CommandError, match="exit code 1"):
        call_command("fdb", "peek", "nobody's")


def test_call_command_writes_where_it_is_told(broker, capsys):
    broker.queue("orders").put(b"x")
    out, err = StringIO(), StringIO()
    call_command("fdb", "queues", stdout=out)
    with pytest.raises(CommandError, match="exit code 1"):
        call_command("fdb", "peek", "nobody's", stderr=err)
    assert "orders" in out.getvalue()
    assert "nobody's" in err.getvalue()
    assert capsys.readouterr() == ("", "")


def test_exit_codes_are_those_of_the_command_line(broker, configure):
    assert run("peek", "nobody's") == 1
    assert run("nonsense") == 2
    configure(CELERY_FDB={"BROKER_URL": "fdb+sqlite:////nowhere/broker.db"})
    assert run("status") == 3


def test_the_app_of_the_settings_belongs_to_their_broker(app, url, configure, monkeypatch, capsys):
    """With its options, and its results."""
    options = {"namespace": "shop"} if url.startswith("fdb+sqlite") else {}  # a cluster's URL names one
    app.conf.update(broker_transport_options=options, result_backend="cache+memory://")
    monkeypatch.setattr("celery_fdb.contrib.django.conf.celery_app", lambda _: app)
    configure(CELERY_FDB={"BROKER_URL": url, "APP": "shop.celery:app"})
    app.send_task("shop.charge", task_id="order-7")
    assert run("cancel", "order-7", "--json") == 0
    assert json.loads(capsys.readouterr().out)["revoked"]
    assert app.AsyncResult("order-7").state == "REVOKED"


def test_an_option_may_be_a_path(configure, tmp_path):
    url = f"fdb+sqlite:///{tmp_path}/broker.db"
    Broker.open(url).close()
    configure(CELERY_FDB={"BROKER_URL": url, "OPTIONS": {"cluster_file": tmp_path / "fdb.cluster"}})
    assert run("queues", "--json") == 0


def test_a_broker_that_is_named_needs_no_settings(broker, url, configure, capsys):
    broker.queue("orders").put(b"x")
    configure(CELERY_FDB={"PAGESIZE": 3})
    for given in (["--broker", url, "queues"], [f"--broker={url}", "queues", "--json"]):
        assert run(*given) == 0
        call_command("fdb", *given)
        assert capsys.readouterr().out.count("orders") == 2


def test_unusable_settings_are_one_line(configure, capsys):
    configure(CELERY_FDB={"PAGESIZE": 3})
    assert run("status") == 2
    assert "Did you mean PAGE_SIZE?" in capsys.readouterr().err
    with pytest.raises(CommandError, match="Did you mean PAGE_SIZE"):
        call_command("fdb", "status")
