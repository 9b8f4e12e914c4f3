"""The wheel: everything in it, and as pip installs it, a project finds transport and plugin with no import of ours.

Dependencies are those of the environment of this run, lent to the new one by a path file; no index is asked.
"""

import email
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from kit.processes import run_python

pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """What ``pip install --no-deps --target`` makes of a pure wheel."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def run(installed, tmp_path):
    def run(code):
        return run_python("-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}).stdout

    return run


def test_one_wheel_with_both_packages(wheel):
    assert wheel.name == f"celery_fdb-{VERSION}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "_kombu_fdb_autoload.py",
        "celery_fdb/py.typed",
        "kombu_fdb/py.typed",
        "kombu_fdb/transport/__init__.py",
        "kombu_fdb/testing/__init__.py",
        f"celery_fdb-{VERSION}.dist-info/licenses/LICENSE",
    } <= names
    assert not [name for name in names if "conformance" in name or "simulation" in name or "/test_" in name]
    assert {name.partition("/")[0] for name in names} == {
        "_kombu_fdb_autoload.py",
        "celery_fdb",
        f"celery_fdb-{VERSION}.dist-info",
        "kombu_fdb",
    }


def metadata(wheel):
    name = f"celery_fdb-{VERSION}.dist-info/METADATA"
    return email.message_from_bytes(zipfile.ZipFile(wheel).read(name))


def test_every_link_of_the_readme_works_on_the_package_index(wheel):
    """There is no file beside the README there."""
    targets = re.findall(r"\]\(([^)]+)\)", metadata(wheel).get_payload())
    assert [each for each in targets if not each.startswith(("https://", "#"))] == []
    (source,) = (url for name, url in links(wheel) if name == "Source")
    assert f"{source}/blob/v{VERSION}/docs/guarantees.md" in targets


def links(wheel):
    return [each.split(", ") for each in metadata(wheel).get_all("Project-URL")]


def test_the_index_has_links_to_the_project(wheel):
    assert {name for name, _ in links(wheel)} == {"Documentation", "Changelog", "Source", "Issues", "Security"}


def test_one_file_names_the_repository(wheel):
    (source,) = (url for name, url in links(wheel) if name == "Source")
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if known.returncode:
        pytest.skip("no checkout of git")
    naming = [name for name in known.stdout.splitlines() if source.encode() in (ROOT / name).read_bytes()]
    assert naming == ["pyproject.toml"]


def test_every_file_of_the_checkout_is_in_the_wheel(wheel):
    sources = {
        str(path.relative_to(ROOT))
        for package in ("kombu_fdb", "celery_fdb")
        for path in (ROOT / package).rglob("*.*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert "celery_fdb/web/templates/queues.html" in sources
    assert "celery_fdb/contrib/outbox/django/migrations/0001_initial.py" in sources
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


def test_the_name_survives_pickle_clone_and_failover(run):
    out = run(
        "import pickle\n"
        "from kombu import Connection, Queue\n"
        "c = Connection('fdb+sqlite:////tmp/a.db;fdb://')\n"
        "print(pickle.loads(pickle.dumps(c)).get_transport_cls().__name__, c.clone().get_transport_cls().__name__)\n"
        "c.switch('fdb://')\n"
        "print(c.get_transport_cls().__name__)",
    )
    assert out == "Transport Transport\nTransport\n"


def test_nothing_heavy_is_imported_by_the_entry_point(run):
    out = run(
        "import kombu.serialization, sys\n"
        "print('_kombu_fdb_autoload' in sys.modules, 'kombu_fdb' in sys.modules, 'fdb' in sys.modules)",
    )
    assert out == "True False False\n"


# -- in an environment of its own --------------------------------------------------------------------------------------

SHOP = """
from celery import Celery

app = Celery("shop", broker="fdb+sqlite:///broker.db", set_as_current=False)
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)


@app.task
def charge(customer):
    import pathlib
    pathlib.Path("charged").write_text(customer)
    app.control.shutdown()
"""


def check(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The new environment's Python."""
    folder = tmp_path_factory.mktemp("venv")
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip("this Python makes no environment with pip in it")
    python = folder / "bin" / "python"
    check(python, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", wheel, env=clean())
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text("\n".join(lent()))
    return python


def lent():
    """Where the packages of this run are, also those that it has lent itself."""
    places = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("-packages"))}
    return sorted(places)


def clean():
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "CELERY_"))}


@pytest.fixture
def project(python, tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)

    def run(*arguments):
        return check(python, *arguments, cwd=tmp_path, env=clean())

    return run


@pytest.mark.process
def test_what_is_imported_is_what_was_installed(project, python):
    out = project("-c", "import kombu_fdb, celery_fdb, _kombu_fdb_autoload as a; print(kombu_fdb, celery_fdb, a)")
    assert out.count(str(python.parents[1])) == 3, out


@pytest.mark.process
def test_a_project_publishes_and_works(project, tmp_path):
    project("-m", "celery", "-A", "shop", "call", "shop.charge", "--args", '["alice"]')
    project("-m", "celery", "-A", "shop", "worker", "-P", "solo", "-l", "WARNING")
    assert (tmp_path / "charged").read_text() == "alice"


@pytest.mark.process
def test_the_doctor_is_content(project, tmp_path):
    out = project("-m", "kombu_fdb.doctor", f"fdb+sqlite:///{tmp_path}/broker.db")
    assert f"ok    celery-fdb      {VERSION}" in out
    assert "ok    URL schemes     fdb://, fdb+sqlite://" in out


@pytest.mark.process
def test_pytest_has_the_fixtures(project, tmp_path):
    (tmp_path / "test_shop.py").write_text(
        "import shop\n"
        "def test_it(fdb_broker, fdb_published):\n"
        "    with fdb_broker.use(shop.app):\n"
        "        shop.charge.delay('bob')\n"
        "    assert fdb_published()[0].args == ['bob']\n"
    )
    assert "1 passed" in project("-m", "pytest", "-q", "-p", "no:celery", "-p", "no:cacheprovider", ".")
