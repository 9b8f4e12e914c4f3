"""``make release-check``: everything that can be known of a release before it is published.

    python release/check.py                  # leaves wheel and sdist in dist/, the bill of materials in build/
    python release/check.py --tag v0.2.0     # and that is the version that is built

Wheel and sdist are built, their metadata and README are checked as the package index does, each is installed into an
empty environment with what it depends on, and there the tour runs, with real workers. Exit code 1 at the first step
that fails; its output says why.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST, BUILD = ROOT / "dist", ROOT / "build"
URL = "fdb+sqlite:///{folder}/broker.db"


class Refused(Exception):
    """This is not to be released; the text says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check a release before it is published.")
    parser.add_argument("--tag", help="the tag that is released, such as v0.2.0")
    given = parser.parse_args(arguments)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    try:
        check_names(version, given.tag)
        for built in build(version):
            check_in_an_empty_environment(built, version)
    except (Refused, subprocess.CalledProcessError) as error:
        print(f"not to be released: {error}", file=sys.stderr)
        return 1
    print(f"celery-fdb {version} can be released: {DIST.name}/, {BUILD.name}/")
    return 0


def check_names(version: str, tag: str | None) -> None:
    """Tag and changelog are those of the version. Raises ``Refused``."""
    if tag is not None and tag != f"v{version}":
        raise Refused(f"the tag is {tag}, the version in pyproject.toml is {version}")
    heading = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", changelog(), re.MULTILINE)
    if heading is None:
        raise Refused(f"CHANGELOG.md has no heading '## [{version}] - YYYY-MM-DD'")
    date.fromisoformat(heading[1])


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def build(version: str) -> list[Path]:
    """Wheel and sdist, their metadata checked. The wheel is built from the sdist, so the sdist is complete."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    found = sorted(DIST.iterdir())
    expected = [f"celery_fdb-{version}-py3-none-any.whl", f"celery_fdb-{version}.tar.gz"]
    if [each.name for each in found] != expected:
        raise Refused(f"built {[each.name for each in found]}, not {expected}")
    run(sys.executable, "-m", "twine", "check", "--strict", *found)
    return found


def check_in_an_empty_environment(built: Path, version: str) -> None:
    """Install ``built`` where there is nothing yet, and run what a new user would run."""
    print(f"== {built.name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="celery-fdb-release-") as name:
        folder = Path(name)
        python = folder / "environment" / "bin" / "python"
        run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, python.parents[1])
        run(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python, built)
        said = run(python, "-c", "import kombu_fdb; print(kombu_fdb.__version__, kombu_fdb.__file__)", cwd=folder)
        if not said.startswith(f"{version} {python.parents[1]}"):
            raise Refused(f"what is imported is not what was installed: {said}")
        run(python, "-m", "kombu_fdb.doctor", URL.format(folder=folder), cwd=folder)
        if built.suffix == ".whl":
            write_bill_of_materials(python, version)
        run(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python, f"{built}[web]")
        print(run(python, "-m", "celery_fdb", "tour", cwd=folder).strip().rpartition("\n")[2], flush=True)


def write_bill_of_materials(python: Path, version: str) -> None:
    """What a user gets who installs the wheel today, in CycloneDX's form."""
    BUILD.mkdir(exist_ok=True)
    bill = BUILD / f"celery_fdb-{version}.cdx.json"
    settings: list[str | Path] = [
        "--output-reproducible",
        "--of",
        "JSON",
        "-o",
        bill,
        "--pyproject",
        ROOT / "pyproject.toml",
    ]
    run(sys.executable, "-m", "cyclonedx_py", "environment", *settings, python)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What it printed. Raises ``CalledProcessError`` after printing that, if it fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CELERY_"))}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
