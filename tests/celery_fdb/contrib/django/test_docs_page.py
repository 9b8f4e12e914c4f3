"""docs/django.md is done, step by step, in a project as ``startproject`` makes it; its settings are the code's."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from kit.processes import run_python

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "django.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_table_of_settings_is_that_of_the_code():
    from celery_fdb.contrib.django.conf import DjangoSettings

    found = re.findall(r"^\| `([A-Z_]+)` \| `(.*?)` \|", PAGE.read_text(), re.MULTILINE)
    assert found == [
        (each.name.upper(), repr(getattr(DjangoSettings(), each.name))) for each in dataclasses.fields(DjangoSettings)
    ]


def test_the_permissions_are_those_of_the_models():
    from django.contrib.auth.models import Permission

    made = Permission.objects.filter(content_type__app_label="celery_fdb").values_list("codename", flat=True)
    assert set(re.findall(r"^\| `celery_fdb\.(\w+)` \| [a-z]", PAGE.read_text(), re.MULTILINE)) == set(made)


@pytest.fixture
def run(tmp_path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("DJANGO_SETTINGS_MODULE", None)

    def run(*arguments):
        done = run_python(*arguments, cwd=tmp_path, env=environ)
        return done.stdout

    return run


@pytest.mark.process
def test_the_page_takes_a_project_over(run, tmp_path):
    """Blocks of Python go into the file they name, commands are run, in the order of the page."""
    import django

    run("-m", "django", "startproject", "mysite", ".")
    run("-m", "django", "startapp", "shop")
    settings = tmp_path / "mysite" / "settings.py"
    settings.write_text(
        settings.read_text() + "\nINSTALLED_APPS += ['shop']\nCELERY_BROKER_URL = 'redis://localhost'\n"
    )
    commands = []
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            first, _, code = text.replace("/var/lib/mysite", str(tmp_path)).partition("\n")
            if "TASKS =" in code and django.VERSION < (6, 0):
                continue
            if first == "# in a view":
                run("-c", f"import django, mysite.celery; django.setup()\n{code}")
                continue
            file = tmp_path / first.removeprefix("# ")
            file.write_text(f"{file.read_text() if file.exists() else ''}\n{code}")
        else:
            commands += [line for line in text.splitlines() if line.startswith("python ")]
            for command in [line for line in text.splitlines() if line.startswith("python ")]:
                run(*command.split()[1:])
    assert len(commands) == 8
    assert '"ready": 3, "delayed": 1' in run("manage.py", "fdb", "queues", "--json")
