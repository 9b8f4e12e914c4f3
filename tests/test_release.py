"""What refuses a release, and what the package index is given to read (``release/``)."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
REPOSITORY = "https://example.com/shop/broker"


def load(name):
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check, readme = load("check"), load("readme")


@pytest.mark.parametrize("tag", [None, f"v{VERSION}"])
def test_the_version_has_its_heading_and_tag(tag):
    check.check_names(VERSION, tag)


@pytest.mark.parametrize("tag", ["v0.0.1", VERSION, "main", ""])
def test_another_tag_is_refused(tag):
    with pytest.raises(check.Refused, match="the version in pyproject"):
        check.check_names(VERSION, tag)


@pytest.mark.parametrize("heading", ["## [Unreleased]", "## [9.9.9]", "## [9.9.9] - soon", "## [9x9x9] - 2026-11-22"])
def test_a_version_without_its_heading_and_date_is_refused(monkeypatch, heading):
    monkeypatch.setattr(check, "changelog", lambda: f"# Changelog\n\n{heading}\n")
    with pytest.raises((check.Refused, ValueError)):
        check.check_names("9.9.9", None)


def test_a_step_that_fails_ends_the_check(monkeypatch, capsys):
    monkeypatch.setattr(check, "build", lambda _: check.run("sh", "-c", "echo no compiler; exit 3"))
    assert check.main([]) == 1
    assert "no compiler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("link", "there"),
    [
        ("[cli](docs/cli.md)", f"[cli]({REPOSITORY}/blob/v1/docs/cli.md)"),
        ("[rows](docs/keyspace.md#values)", f"[rows]({REPOSITORY}/blob/v1/docs/keyspace.md#values)"),
        ("![picture](docs/fairness.svg)", f"![picture]({REPOSITORY}/raw/v1/docs/fairness.svg)"),
        ("[![tests](../../actions/badge.svg)](LICENSE)",
         f"[![tests]({REPOSITORY}/actions/badge.svg)]({REPOSITORY}/blob/v1/LICENSE)"),
        ("[below](#options)", "[below](#options)"),
        ("[FoundationDB](https://www.foundationdb.org/)", "[FoundationDB](https://www.foundationdb.org/)"),
    ],
)  # fmt: skip
def test_a_link_leads_into_the_repository(link, there):
    assert readme.absolute(link, REPOSITORY, "v1") == there
