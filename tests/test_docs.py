"""The documentation's tables are those of the code. To write them anew: python -m tests.test_docs."""

import re
from pathlib import Path

import pytest

from celery_fdb.history import layout as history
from celery_fdb.inspection import schedules
from celery_fdb.results import records
from kombu_fdb.keyspace import layout

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
KEYSPACE, RESULTS = DOCS / "keyspace.md", DOCS / "results.md"
#: The page and the mark of a table of keys, and the module whose docstring has it.
TABLES = {
    (KEYSPACE, "keys"): layout,
    (KEYSPACE, "history keys"): history,
    (KEYSPACE, "schedule keys"): schedules,
    (RESULTS, "keys"): records,
}
#: By the page that explains them.
GUARANTEES = {
    DOCS / "guarantees.md": (
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
    ),
    RESULTS: ("CHORD-ONCE", "CHORD-SURE"),
}


def block(mark):
    return re.compile(rf"(?<=<!-- {mark} -->\n).*?(?=<!-- /{mark} -->)", re.DOTALL)


def rendered_keys(module):
    """The module's reStructuredText table in Markdown."""
    _, heading, rows, _ = re.split(r"^=+ +=+ +=+\n", module.__doc__, flags=re.MULTILINE)
    cells = [re.split(r"\s{2,}", line.strip()) for line in (heading, "---  ---  ---", *rows.splitlines())]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells).replace("``", "`")


@pytest.mark.parametrize(("page", "mark"), TABLES, ids=lambda each: getattr(each, "stem", each))
def test_a_table_of_keys_is_that_of_the_code(page, mark):
    written = block(mark).search(page.read_text())
    assert written[0] == rendered_keys(TABLES[page, mark]), "run: python -m tests.test_docs"


def test_keyspace_names_the_format_version():
    assert f"format version {layout.FORMAT_VERSION}" in KEYSPACE.read_text()


def test_every_file_that_is_named_exists():
    """In docs and docstrings. Merging two modules leaves such references behind."""
    packages = [path for package in ("kombu_fdb", "celery_fdb") for path in (ROOT / package).rglob("*.py")]
    known = {f"/{path}" for path in [*packages, *(ROOT / "tests").rglob("*.py"), *ROOT.glob("*.py")]}
    pages = [*packages, DOCS / "architecture.md", DOCS / "lifecycle.md"]
    named = {(path.name, name) for path in pages for name in re.findall(r"`([\w/]+\.py)`", path.read_text())}
    theirs = {"threading.py", "tasks.py"}  # of Python, and of the reader's project
    lost = {(page, name) for page, name in named if not any(each.endswith("/" + name) for each in known)}
    assert named
    assert {(page, name) for page, name in lost if name not in theirs} == set()


def test_every_guarantee_is_explained():
    for page, tags in GUARANTEES.items():
        text = page.read_text()
        assert [tag for tag in tags if f"| `{tag}` |" not in text] == []


def texts_of(*folders):
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    return {path: path.read_text() for path in paths}


def test_a_guarantee_is_upheld_somewhere_and_tested_somewhere():
    tests, code = (texts_of(*folders) for folders in (("tests", "kombu_fdb/testing"), ("kombu_fdb", "celery_fdb")))
    for tag in (tag for tags in GUARANTEES.values() for tag in tags):
        tested = {path for path, text in tests.items() if re.search(rf"\b{tag}\b", text)}
        assert tested, f"no test names {tag}"
        assert any(re.search(rf"\b{tag}\b", code[path]) for path in code.keys() - tested), f"no code names {tag}"


PAGES = sorted((*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob("examples/*/README.md")))
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
#: Of GitHub's own pages, beside the files of the repository.
SIBLING = "../../"


def anchors(page):
    """As GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|mailto:)([^)]+)\)", CODE.sub("", page.read_text())):
            if page.parent == ROOT and target.startswith(SIBLING):
                continue
            path, _, anchor = target.partition("#")
            leads_to = page.parent / path if path else page
            assert leads_to.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(leads_to), f"{page}: {target}"


def test_the_site_shows_every_page():
    """Strict MkDocs says so as well (tests/test_site.py), where it is installed."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert set(re.findall(r"[\w/-]+\.md", navigation)) == {str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md")}


def test_the_readme_says_what_it_is_and_when_to_take_something_else():
    """A picture, badges and the status come before how to use it."""
    first, _, rest = (ROOT / "README.md").read_text().partition("\n## Use\n")
    assert len(re.findall(r"^\[!\[\w+\]\(", first, re.MULTILINE)) >= 4
    assert re.search(r"^\[!\[.+\]\(docs/[\w/-]+\.png\)\]\(docs/", first, re.MULTILINE)
    assert "**Status: " in first
    assert len((first + rest).splitlines()) <= 130, "one screen and a half"
    assert len(re.findall(r"^\* ", rest.split("## When not to use it")[1].split("\n## ")[0], re.MULTILINE)) >= 5


if __name__ == "__main__":
    for (page, mark), module in TABLES.items():
        page.write_text(block(mark).sub(lambda _, module=module: rendered_keys(module), page.read_text()))
