"""The plugin as its users meet it: each test is a small project of theirs, run by a pytest of its own."""

import os
import textwrap
from pathlib import Path

import pytest
from kit.processes import run_python

ROOT = Path(__file__).parents[3]
#: Without what else is installed here; pytest-celery's ``celery_worker`` wants Docker.
PLUGINS = ("-p", "celery_fdb.contrib.pytest_plugin")
#: The binding's old copy of six makes the warning that pyproject.toml ignores here.
WARNINGS = ("-W", "error", "-W", "ignore:_SixMetaPathImporter.find_spec:ImportWarning")

APP = """
from celery import Celery

app = Celery("shop", broker="amqp://production/", set_as_current=False)
app.conf.task_ignore_result = True


@app.task
def charge(customer, amount=1):
    print("charged", customer)


@app.task
def order(customer):
    charge.apply_async((customer,), {"amount": 7}, headers={"fair_key": customer})
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "shop.py").write_text(APP)

    def run(test, *arguments, outcome="1 passed", plugins=PLUGINS):
        (tmp_path / "test_shop.py").write_text(textwrap.dedent(test))
        environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        given = ("-m", "pytest", *plugins, *WARNINGS, "--rootdir", tmp_path, *arguments)
        done = run_python(*given, cwd=tmp_path, env=environ, exit_code=None)
        assert outcome in done.stdout, done.stdout + done.stderr
        assert "session" not in done.stderr, "nothing was left open when its store ended"
        return done.stdout

    return run


# -- what it costs those who don't use it ------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["-VV"], ["--collect-only"], ["--fixtures"]])
def test_pytest_starts_without_celery(tmp_path, arguments):
    code = f"""
import sys, pytest
pytest.main({[*PLUGINS, *arguments]!r})
heavy = {{"celery", "kombu", "fdb", "sqlite3", "kombu_fdb", "sortedcontainers"}}
print("imported:", sorted(heavy & set(sys.modules)), "celery_fdb.contrib.pytest_plugin" in sys.modules)
"""
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = run_python("-c", code, cwd=tmp_path, env=environ)
    assert done.stdout.splitlines()[-1] == "imported: [] True"


def test_a_missing_extra_is_named(project):
    out = project(
        """
        import sys

        sys.modules["sortedcontainers"] = None

        def test_it(fdb_broker): ...
        """,
        outcome="1 error",
    )
    assert "pip install sortedcontainers" in out
    assert "Traceback" not in out


# -- what was published ------------------------------------------------------------------------------------------------


def test_what_an_app_publishes_can_be_looked_at(project):
    project(
        """
        from datetime import UTC, datetime, timedelta

        from shop import app, charge, order

        def test_it(fdb_broker, fdb_published):
            with fdb_broker.use(app):
                charge.delay("alice")
                charge.apply_async(("bob",), {"amount": 7}, headers={"fair_key": "bob"}, priority=9)
                later = datetime.now(UTC) + timedelta(hours=1)
                charge.apply_async(("carol",), eta=later, queue="slow")
            alice, bob, carol = sorted(fdb_published(), key=lambda each: each.args)
            assert (alice.task, alice.queue, alice.state, alice.key) == ("shop.charge", "celery", "ready", "")
            assert (bob.args, bob.kwargs, bob.key, bob.properties["priority"]) == (["bob"], {"amount": 7}, "bob", 9)
            assert (carol.queue, carol.state, carol.eta) == ("slow", "delayed", later)
            assert fdb_published("slow") == [carol]
            assert fdb_published("nothing") == []
        """
    )


def test_each_test_has_an_empty_broker_and_the_app_gets_its_own_back(project):
    project(
        """
        import pytest
        from shop import app, charge

        @pytest.mark.parametrize("number", [1, 2])
        def test_it(fdb_broker, fdb_published, number):
            with fdb_broker.use(app):
                charge.delay(number)
                assert [each.args for each in fdb_published()] == [[number]]
                assert app.connection_for_write().as_uri().startswith(fdb_broker.url)
            assert app.conf.broker_url == "amqp://production/"
            assert app.connection_for_write().as_uri().startswith("amqp://")
        """,
        outcome="2 passed",
    )


def test_djangos_pages_show_the_broker_of_the_test(project):
    pytest.importorskip("django")
    project(
        """
        import django
        import pytest
        from django.conf import settings

        from shop import app, charge

        installed = ["django.contrib.auth", "django.contrib.contenttypes", "celery_fdb.contrib.django"]
        settings.configure(INSTALLED_APPS=installed, CELERY_FDB={"APP": "shop:app"})
        django.setup()
        from celery_fdb.contrib.django.conf import lazy_broker


        @pytest.mark.parametrize("number", [1, 2])
        def test_it(fdb_broker, number):
            with fdb_broker.use(app):
                for _ in range(number):
                    charge.delay("acme")
                assert lazy_broker.broker().queue("celery").stats().ready == number
        """,
        outcome="2 passed",
    )


def test_what_is_not_json_is_not_decoded(project):
    project(
        """
        import pytest
        from kombu import Connection
        from kombu.exceptions import ContentDisallowed

        from kombu_fdb import Broker

        def test_it(fdb_broker, fdb_published):
            with Connection(fdb_broker.url) as connection:
                connection.Producer().publish({"os": "system"}, routing_key="pickles", serializer="pickle")
            with Broker.open(fdb_broker.url) as broker:
                broker.queue("plain").put(b"bytes")
            plain, pickled = sorted(fdb_published(), key=lambda each: each.queue, reverse=True)
            assert plain.body == b"bytes"
            with pytest.raises(ContentDisallowed):
                pickled.content()
        """
    )


def test_what_is_compressed_is_decoded(project):
    project(
        """
        from kombu import Connection

        def test_it(fdb_broker, fdb_published):
            with Connection(fdb_broker.url) as connection:
                connection.Producer().publish([[7], {}, {}], routing_key="q", compression="gzip")
            (message,) = fdb_published()
            assert message.args == [7]
        """
    )


def test_the_url_is_an_error_outside_of_tests(tmp_path):
    code = "from kombu_fdb import Broker; Broker.open('fdb+memory://orders')"
    done = run_python("-c", code, cwd=ROOT, exit_code=None)
    assert "stores in memory are for tests" in done.stderr.splitlines()[-1]
    assert "fdb_broker" in done.stderr.splitlines()[-1]


def test_a_broker_named_by_the_environment_is_refused(project, monkeypatch):
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://production/")
    project(
        """
        import pytest
        from shop import app

        def test_it(fdb_broker):
            with pytest.raises(ValueError, match="Unset CELERY_BROKER_URL"), fdb_broker.use(app):
                pass
        """
    )


def test_a_forked_child_is_told(project):
    project(
        """
        import os

        import pytest
        from kombu_fdb import Broker

        def test_it(fdb_broker):
            pid = os.fork()
            if not pid:
                try:
                    Broker.open(fdb_broker.url)
                except Exception as error:
                    os._exit(7 if "fdb_sqlite_broker" in str(error) else 8)
                os._exit(9)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        """
    )


# -- workers -----------------------------------------------------------------------------------------------------------

WORKER = """
import pytest
from celery import chord

@pytest.fixture
def celery_config({broker}):
    return {{**{broker}.config, "result_backend": {broker}.url}}

def test_it(celery_app, celery_worker, {broker}):
    @celery_app.task
    def add(x, y):
        return x + y

    @celery_app.task
    def publish(x):
        add.delay(x, x)

    @celery_app.task
    def add_all(numbers):
        return sum(numbers)

    celery_worker.reload()
    assert add.delay(2, 3).get(timeout=20) == 5
    assert add.apply_async((2, 3), countdown=0.2).get(timeout=20) == 5
    assert publish.delay(4).get(timeout=20) is None
    total = chord([add.s(n, n) for n in range(3)])(add_all.s())
    assert total.get(timeout=20) == 6
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "broker",
    ["fdb_broker", "fdb_sqlite_broker", pytest.param("fdb_cluster_broker", marks=pytest.mark.foundationdb)],
)
def test_celerys_worker_in_the_same_process(project, broker):
    project(WORKER.format(broker=broker), plugins=(*PLUGINS, "-p", "celery.contrib.pytest"))


@pytest.mark.process
def test_celerys_worker_for_the_whole_run(project):
    project(
        """
        import pytest

        @pytest.fixture(scope="session")
        def celery_config(fdb_session_broker):
            return {**fdb_session_broker.config, "result_backend": fdb_session_broker.url}

        @pytest.fixture(scope="session")
        def celery_class_tasks():
            return []

        @pytest.fixture(scope="session", autouse=True)
        def tasks(celery_session_app):
            @celery_session_app.task(name="add")
            def add(x, y):
                return x + y

        @pytest.mark.parametrize("number", range(3))
        def test_it(celery_session_app, celery_session_worker, number):
            assert celery_session_app.tasks["add"].delay(number, 1).get(timeout=20) == number + 1
        """,
        plugins=(*PLUGINS, "-p", "celery.contrib.pytest"),
        outcome="3 passed",
    )
