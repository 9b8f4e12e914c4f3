"""``manage.py check``: each message appears with its cause, names the next step, and goes away with it."""

import re
from pathlib import Path

import pytest
from celery import Celery
from celery.fixups.django import DjangoFixup
from celery.signals import import_modules
from django.core import checks as django_checks
from django.test import modify_settings

from celery_fdb.contrib.django import checks


def messages(*, deploy=False):
    """What ``check`` tells of us, by id."""
    found = [each for each in django_checks.run_checks(include_deployment_checks=deploy) if "celery_fdb" in each.id]
    assert all(each.hint for each in found), "each names the next step"
    return {each.id.removeprefix("celery_fdb."): each for each in found}


@pytest.fixture
def app(monkeypatch, tmp_path):
    """The project's app, on a broker of ours."""
    app = Celery("shop", broker=f"fdb+sqlite:///{tmp_path}/broker.db", set_as_current=False)
    monkeypatch.setattr("celery_fdb.contrib.django.conf.celery_app", lambda _: app)
    return app


@pytest.mark.parametrize(
    ("without", "hint"),
    [("celery_fdb.contrib.django", "Write celery_fdb.contrib.django instead"), ("", "Remove it")],
)
def test_the_package_is_not_the_app(without, hint):
    with modify_settings(INSTALLED_APPS={"append": "celery_fdb", "remove": without}):
        assert hint in messages()["W015"].hint


def test_a_good_project_has_nothing_to_mend(app, configure):
    configure(CELERY_BROKER_URL=app.conf.broker_url)
    assert messages(deploy=True) == {}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"PAGESIZE": 3}, "PAGE_SIZE"),
        ({"page_size": 3}, "PAGE_SIZE"),
        ({"PAGE_SIZE": "3"}, "1 to 500 rows"),
        ({"PAGE_SIZE": 0}, "1 to 500 rows"),
        ({"PAGE_SIZE": 501}, "1 to 500 rows"),
        ({"SHOW_BODIES": 1}, "True or False"),
        ({"CONNECT_TIMEOUT": True}, "seconds"),
        ({"OPTIONS": []}, "dict"),
        (["PAGE_SIZE"], "CELERY_FDB = {}"),
        ({"APP": "nowhere.celery:app"}, "package.module:name"),
        ({"APP": "os.path:join"}, "not a Celery app"),
    ],
)
def test_unusable_settings(configure, settings, says):
    configure(CELERY_FDB=settings)
    found = messages()
    assert found.keys() == {"E001"}
    assert says in f"{found['E001'].msg} {found['E001'].hint}"


PATH = Path("/var/lib/shop/broker.db")
UNSAFE = ["application/x-python-serialize", "application/x-yaml", "pickle", "yaml"]


@pytest.mark.parametrize(
    ("conf", "name", "says"),
    [
        ({"broker_transport_options": {"sesion_ttl": 3}}, "E002", ["session_ttl"]),
        ({"broker_transport_options": {"session_ttl": -1}}, "E002", ["session_ttl"]),
        ({"broker_url": "redis://:hidden@localhost/0"}, "W001", ["redis://"]),
        ({"broker_url": PATH}, "W001", [str(PATH), "fdb+sqlite:////path/broker.db"]),
        ({"broker_url": [PATH]}, "W001", [str(PATH), "fdb+sqlite:////path/broker.db"]),
        ({"broker_url": None}, "W001", ["The Celery app names no broker. "]),
        ({"broker_url": ""}, "W001", ["The Celery app names no broker. "]),
        ({"broker_url": "fdb:////nowhere/missing.cluster"}, "W007", ["missing.cluster"]),
        ({"accept_content": ["json", *UNSAFE]}, "W008", UNSAFE),
    ],
    ids=str,
)
def test_what_is_wrong_in_the_apps_configuration(app, conf, name, says):
    app.conf.update(conf)
    ((found, message),) = messages().items()
    told = f"{message.msg} {message.hint}"
    assert (found, [each for each in says if each not in told], "hidden" in told) == (name, [], False)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("fdb:///shop/results", {}, "ambiguous path"),
        ("fdb+sqlite://host/results.db", {}, "four slashes"),
        ("fdb+sqlite:////srv/results.db", {"sesion_ttl": 3}, "session_ttl"),
    ],
)
def test_a_result_backend_with_which_no_worker_starts(app, url, options, says):
    app.conf.update(result_backend=url, result_backend_transport_options=options)
    found = messages()
    assert found.keys() == {"E002"}
    assert found["E002"].msg.startswith("The result backend: ")
    assert says in f"{found['E002'].msg} {found['E002'].hint}"
    app.conf.broker_url = "redis://localhost"
    assert messages().keys() == {"W001", "E002"}, "whatever the broker is"


THEIRS = (None, "", "rpc://", "redis://localhost/0", "fdb", "fdb.backends:Theirs")


@pytest.mark.parametrize("conf", [*({"result_backend": each} for each in THEIRS), {"include": ["no_such_module"]}])
def test_what_is_another_librarys_or_the_doctors(app, conf):
    app.conf.update(conf)
    assert messages() == {}


def test_the_files_of_broker_and_result_backend_are_checked_alike(app, tmp_path, configure, monkeypatch):
    app.conf.result_backend = f"fdb+sqlite:///{tmp_path}/nowhere/results.db"
    (found,) = messages().values()
    assert (found.id, found.hint) == ("celery_fdb.W003", f"mkdir -p {tmp_path}/nowhere")
    assert found.msg.startswith("The result backend's file: ")
    monkeypatch.chdir(tmp_path)
    app.conf.result_backend = "fdb+sqlite:///results.db"
    assert "four slashes" in str(messages()["W003"].hint)
    (tmp_path / "results.db").touch(mode=0o600)
    app.conf.result_backend = f"fdb+sqlite:///{tmp_path}/results.db"
    configure(MEDIA_ROOT=str(tmp_path))
    served = {each.msg for each in django_checks.run_checks() if each.id == "celery_fdb.W006"}
    files = ("The broker's file", "The result backend's file")
    assert served == {f"{each} is in MEDIA_ROOT, which web servers serve to anyone." for each in files}


def test_a_store_of_broker_and_results_is_checked_once(app, tmp_path):
    app.conf.broker_url = app.conf.result_backend = f"fdb+sqlite:///{tmp_path}/nowhere/broker.db"
    (found,) = [each for each in django_checks.run_checks() if "celery_fdb" in each.id]
    assert found.msg.startswith("The broker's file: ")


def test_of_several_urls_the_first_of_ours_counts(app):
    app.conf.broker_url = f"redis://localhost;{app.conf.broker_url}"
    assert messages() == {}


def test_an_app_that_does_not_read_djangos_settings(app, configure):
    configure(CELERY_BROKER_URL="fdb://")
    assert messages().keys() == {"W002"}


def test_a_folder_that_is_missing(app, tmp_path, configure):
    app.conf.broker_url = f"fdb+sqlite:///{tmp_path}/nowhere/broker.db"
    assert messages()["W003"].hint == f"mkdir -p {tmp_path}/nowhere"
    configure(CELERY_FDB={"CHECKS": False})
    assert messages() == {}


def test_a_path_with_a_slash_too_few(app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("fdb+sqlite:///broker.db", "fdb+sqlite:///var/lib/shop/broker.db"):
        app.conf.broker_url = url
        assert "four slashes" in str(messages()["W003"].hint)


def test_a_file_that_everybody_may_read(app, tmp_path):
    file = tmp_path / "broker.db"
    file.touch(mode=0o660)
    assert messages() == {}, "a group may be meant to"
    file.chmod(0o664)
    found = messages()
    assert found.keys() == {"W004"}
    assert "chmod o=" in found["W004"].hint


def test_a_file_that_is_also_djangos(app, tmp_path, monkeypatch):
    from django.db import connection

    monkeypatch.setitem(connection.settings_dict, "NAME", str(tmp_path / "broker.db"))
    assert messages().keys() == {"W005"}


@pytest.mark.parametrize("name", ["MEDIA_ROOT", "STATIC_ROOT"])
def test_a_file_that_is_served(app, tmp_path, configure, name):
    configure(**{name: str(tmp_path)})
    assert messages().keys() == {"W006"}


def test_options_of_a_task_that_do_nothing(app):
    assert "W017" not in messages()
    app.task(messages, name="shop.pay", dead_letter=True)
    assert "shop.pay (dead_letter)" in messages()["W017"].msg


def test_options_of_a_task_that_only_a_worker_loads(app, tmp_path, monkeypatch):
    late = "from celery import shared_task\n\n@shared_task(name='shop.late', dead_letter=True)\ndef late(): ...\n"
    (tmp_path / "late_tasks.py").write_text(late)
    monkeypatch.syspath_prepend(tmp_path)
    app.conf.include = ["late_tasks"]
    assert "shop.late (dead_letter)" in messages()["W017"].msg


def test_each_load_of_tasks_runs_the_checks_once(app):
    """Celery's fix-up runs all checks when tasks are loaded. The check that loads them must not run itself again."""
    fixup = DjangoFixup(app)
    runs = []

    def on_import(**_):
        runs.append(None)
        fixup.on_import_modules()

    import_modules.connect(on_import, sender=app, weak=False)
    messages()
    assert len(runs) == 1
    app.loader.init_worker()
    assert len(runs) == 2


def test_no_admin(app, monkeypatch):
    monkeypatch.setattr("celery_fdb.contrib.django.checks.apps.is_installed", lambda _: False)
    assert messages().keys() == {"W009"}


def test_a_store_that_does_not_answer_is_found_before_deployment(app, tmp_path):
    app.conf.broker_url = f"fdb+sqlite:///{tmp_path}/nowhere/broker.db"
    assert "W010" not in messages()
    assert "W010" in messages(deploy=True)


def test_the_default_namespace_of_a_cluster(app, monkeypatch):
    monkeypatch.setattr("celery_fdb.contrib.django.conf.lazy_broker.broker", lambda: None)
    app.conf.broker_url = "fdb://"
    assert "W011" in messages(deploy=True)
    app.conf.broker_url = "fdb:///shop"
    assert "W011" not in messages(deploy=True)


def test_atomic_requests(app, monkeypatch):
    from django.db import connection

    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    assert "W012" not in messages()
    assert "delay_on_commit" in messages(deploy=True)["W012"].hint


def test_a_project_without_default_auto_field_is_not_warned_of_our_models():
    from django.conf import settings

    assert not settings.is_overridden("DEFAULT_AUTO_FIELD")
    assert [each for each in django_checks.run_checks() if each.id == "models.W042"] == []


def test_every_id_is_in_the_table_and_made_somewhere():
    names = ("checks.py", "backend.py", "../../apps.py")
    source = "".join(Path(checks.__file__).parent.joinpath(name).read_text() for name in names)
    listed = re.findall(r"^``celery_fdb\.(\w\d+)``", checks.__doc__ or "", re.MULTILINE)
    made = set(re.findall(r'"(?:celery_fdb\.)?([EW]\d{3})"', source))
    assert len(listed) == len(set(listed))
    assert set(listed) == made


def test_the_broker_shown_is_the_one_that_workers_read_from(app):
    from celery_fdb.brokers import broker_of
    from celery_fdb.contrib.django import conf

    app.conf.broker_read_url, app.conf.broker_write_url = "fdb:///read", "fdb:///written"
    assert conf.broker_of(conf.DjangoSettings()) == broker_of(app) == ("fdb:///read", {})
