"""The wheel as pip installs it into an environment of its own: a project there finds transport and plugin.

Dependencies are those of the environment of this run, lent to the new one by a path file; no index is asked.
"""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("fresh venv")

ROOT = Path(__file__).parents[1]

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
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    check(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT)
    (path,) = folder.iterdir()
    return path


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
def run(python, tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)

    def run(*arguments):
        return check(python, *arguments, cwd=tmp_path, env=clean())

    return run


@pytest.mark.process
def test_what_is_imported_is_what_was_installed(run, python):
    out = run("-c", "import kombu_fdb, celery_fdb, _kombu_fdb_autoload as a; print(kombu_fdb, celery_fdb, a)")
    assert out.count(str(python.parents[1])) == 3, out


@pytest.mark.process
def test_a_project_publishes_and_works(run, tmp_path):
    run("-m", "celery", "-A", "shop", "call", "shop.charge", "--args", '["alice"]')
    run("-m", "celery", "-A", "shop", "worker", "-P", "solo", "-l", "WARNING")
    assert (tmp_path / "charged").read_text() == "alice"


@pytest.mark.process
def test_the_doctor_is_content(run, tmp_path):
    out = run("-m", "kombu_fdb.doctor", f"fdb+sqlite:///{tmp_path}/broker.db")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ok    celery-fdb      {version}" in out
    assert "ok    URL schemes     fdb://, fdb+sqlite://" in out


@pytest.mark.process
def test_pytest_has_the_fixtures(run, tmp_path):
    (tmp_path / "test_shop.py").write_text(
        "import shop\n"
        "def test_it(fdb_broker, fdb_published):\n"
        "    with fdb_broker.use(shop.app):\n"
        "        shop.charge.delay('bob')\n"
        "    assert fdb_published()[0].args == ['bob']\n"
    )
    assert "1 passed" in run("-m", "pytest", "-q", "-p", "no:celery", "-p", "no:cacheprovider", ".")
