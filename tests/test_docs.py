"""The documentation's tables are those of the code. To write them anew: python -m tests.test_docs."""

import re
from pathlib import Path

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


def test_every_guarantee_of_the_engine_is_explained():
    text = (DOCS / "guarantees.md").read_text()
    assert [tag for tag in GUARANTEES if f"| `{tag}` |" not in text] == []


def texts_of(*folders):
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
    return {path: path.read_text() for path in paths}


def test_a_guarantee_is_upheld_somewhere_and_tested_somewhere():
    tests, code = (texts_of(*folders) for folders in (("tests", "kombu_fdb/testing"), ("kombu_fdb",)))
    for tag in GUARANTEES:
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
    KEYSPACE.write_text(BLOCK.sub(lambda _: rendered_keys(), KEYSPACE.read_text()))
