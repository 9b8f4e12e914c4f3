"""The documentation's tables are those of the code. To write them anew: python -m tests.test_docs."""

import re
from pathlib import Path

import pytest

from kombu_fdb.keyspace import layout

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
KEYSPACE = DOCS / "keyspace.md"
BLOCK = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- /keys -->)", re.DOTALL)
GUARANTEES = (
    "ONE-PLACE",
    "ONE-OWNER",
    "DURABLE",
    "NOT-EARLY",
    "BACK-SOON",
    "NOT-TWICE",
    "ONE-ACTIVE",
    "POISON-ENDS",
    "FAIR",
    "KEY-LIMIT",
    "ONCE-PUBLISHED",
    "SKEW",
    "COUNTS",
    "BOUNDED",
)


def rendered_keys():
    """The reStructuredText table of ``layout.py`` in Markdown."""
    _, heading, rows, _ = re.split(r"^=+ +=+ +=+\n", layout.__doc__, flags=re.MULTILINE)
    lines = [heading, "--- | --- | ---", *rows.splitlines()]
    cells = [lines[1].split(" | ") if " | " in line else re.split(r"\s{2,}", line.strip()) for line in lines]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells).replace("``", "`")


def test_keyspace_is_that_of_the_code():
    assert BLOCK.search(KEYSPACE.read_text())[0] == rendered_keys(), "run: python -m tests.test_docs"


def test_keyspace_names_the_format_version():
    assert f"format version {layout.FORMAT_VERSION}" in KEYSPACE.read_text()


def test_every_guarantee_of_the_engine_is_explained():
    text = (DOCS / "guarantees.md").read_text()
    assert [tag for tag in GUARANTEES if f"| `{tag}` |" not in text] == []


def files_with(tag, *folders):
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    return {path for path in paths if re.search(rf"\b{tag}\b", path.read_text())}


@pytest.mark.parametrize("tag", GUARANTEES)
def test_a_guarantee_is_upheld_somewhere_and_tested_somewhere(tag):
    tests = files_with(tag, "tests", "kombu_fdb/testing")
    assert tests, f"no test names {tag}"
    assert files_with(tag, "kombu_fdb") - tests, f"no code names {tag}"


def test_links_between_pages_lead_somewhere():
    for page in (*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("examples/*/README.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


if __name__ == "__main__":
    KEYSPACE.write_text(BLOCK.sub(lambda _: rendered_keys(), KEYSPACE.read_text()))
