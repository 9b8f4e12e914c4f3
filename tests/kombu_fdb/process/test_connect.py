from pathlib import Path

import pytest

from kombu_fdb import Broker
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.process.session_threads import _program


def test_a_path_with_a_slash_too_few_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreUnavailable, match=r"relative path.*four slashes"):
        Broker.open("fdb+sqlite:///var/lib/shop/broker.db")


def test_a_folder_that_is_missing_is_named_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(StoreUnavailable, match=f"mkdir -p {tmp_path}/typo"):
        Broker.open(f"fdb+sqlite:///{tmp_path}/typo/broker.db")


def test_a_relative_path_is_opened_where_the_process_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Broker.open("fdb+sqlite:///broker.db").close()
    assert (tmp_path / "broker.db").exists()


@pytest.mark.parametrize("path", ["/venv/bin/celery", "/site-packages/celery/__main__.py"])
def test_a_program_is_called_by_its_name_however_it_was_started(path):
    assert _program(Path(path)) == "celery"
