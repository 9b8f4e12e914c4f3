"""The wheel: everything in it, and enough for ``broker_url`` to work with no import by the user."""

import email
import os
import re
import subprocess
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


@pytest.mark.parametrize("url", ["fdb://", "fdb+sqlite:////tmp/x.db"])
def test_the_scheme_is_known_without_an_import(run, url):
    """Resolving the scheme is kombu's part; loading the transport class is what it does next."""
    out = run(
        f"from kombu import Connection, Queue\n"
        f"cls = Connection({url!r}).get_transport_cls()\n"
        f"print(cls.__module__.split('.')[0], cls.__name__)",
    )
    assert out == "kombu_fdb Transport\n"


def test_celery_apps_know_the_scheme(run):
    out = run(
        "from celery import Celery\n"
        "app = Celery(broker='fdb+sqlite:////tmp/x.db')\n"
        "print(app.connection_for_write().get_transport_cls().__name__)",
    )
    assert out == "Transport\n"


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
