"""The documentation's tables and numbers are those of the code. To write the tables anew: python -m tests.test_docs."""

import re
from functools import partial
from pathlib import Path

import click
import pytest

from celery_fdb.cli import fdb
from celery_fdb.history import layout as history
from celery_fdb.history import reading, recorder
from celery_fdb.history.options import LARGEST_SEGMENT, LONGEST_AGE_S, MOST_RUNS, SEGMENTS, History
from celery_fdb.history.run import STATES
from celery_fdb.history.views import metrics as by_task
from celery_fdb.inspection import schedules
from celery_fdb.inspection.metrics import GAUGES, KEY_TOTALS, LATE, TOTALS
from celery_fdb.results import backend, chords, records, store
from kombu_fdb.keyspace import layout

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
KEYSPACE, RESULTS, METRICS = DOCS / "keyspace.md", DOCS / "results.md", DOCS / "metrics.md"
#: By the page that explains them.
GUARANTEES = {
    DOCS / "guarantees.md": (
        *("ONE-PLACE", "ONE-OWNER", "DURABLE", "NOT-EARLY", "BACK-SOON", "NOT-TWICE", "ONE-ACTIVE", "POISON-ENDS"),
        *("FAIR", "KEY-LIMIT", "ONCE-PUBLISHED", "SKEW", "COUNTS", "BOUNDED"),
    ),
    RESULTS: ("CHORD-ONCE", "CHORD-SURE"),
}


# -- tables ------------------------------------------------------------------------------------------------------------


def rendered_keys(module):
    """The module's reStructuredText table in Markdown."""
    _, heading, rows, _ = re.split(r"^=+ +=+ +=+\n", module.__doc__, flags=re.MULTILINE)
    cells = [re.split(r"\s{2,}", line.strip()) for line in (heading, "---  ---  ---", *rows.splitlines())]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells).replace("``", "`")


def commands(group, path=()):
    """Each command with the words that call it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def command_table():
    lines = ["| command | |", "|---|---|"]
    for words, command in commands(fdb):
        usage = " ".join([*words, *command.collect_usage_pieces(click.Context(command))]).replace("[OPTIONS] ", "")
        about = command.help.split("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{usage.replace(' [OPTIONS]', '')}` | {about} |")
    return "\n".join(lines) + "\n"


def metric_table():
    totals = {f"{name}_total": about for name, (_, about) in {**TOTALS, **KEY_TOTALS}.items()}
    late = {f"{LATE}_total": "Settlements that came too late: another consumer had the message."}
    return named_table({**GAUGES, **totals, **late})


def named_table(metrics):
    return "".join(["| metric | |\n|---|---|\n", *(f"| `{name}` | {about} |\n" for name, about in metrics.items())])


def django_checks():
    """Out of the text: to import it needs Django."""
    source = (ROOT / "celery_fdb" / "contrib" / "django" / "checks.py").read_text()
    rows = re.findall(r"^``(celery_fdb\.\w+)`` +(--deploy|) +(\S.*)$", source, re.MULTILINE)
    assert len(rows) > 10
    lines = ["| id | when | what |", "|---|---|---|"]
    lines += [f"| `{name}` | {f'`{when}`' if when else ''} | {what} |" for name, when, what in rows]
    return "".join(f"{line}\n" for line in lines).replace("``", "`")


#: The page and the mark of a table, and what writes it.
TABLES = {
    (KEYSPACE, "keys"): partial(rendered_keys, layout),
    (KEYSPACE, "history keys"): partial(rendered_keys, history),
    (KEYSPACE, "schedule keys"): partial(rendered_keys, schedules),
    (RESULTS, "keys"): partial(rendered_keys, records),
    (DOCS / "cli.md", "commands"): command_table,
    (METRICS, "metrics"): metric_table,
    (METRICS, "task metrics"): partial(named_table, by_task.NAMES),
    (DOCS / "django.md", "checks"): django_checks,
}


def block(mark):
    return re.compile(rf"(?<=<!-- {mark} -->\n).*?(?=<!-- /{mark} -->)", re.DOTALL)


@pytest.mark.parametrize(("page", "mark"), TABLES, ids=lambda each: getattr(each, "stem", each))
def test_a_table_is_that_of_the_code(page, mark):
    written = block(mark).search(page.read_text())
    assert written[0] == TABLES[page, mark](), "run: python -m tests.test_docs"


# -- what is said ------------------------------------------------------------------------------------------------------


def said(page):
    return " ".join(page.read_text().split())


def test_the_numbers_are_those_of_the_code():
    assert (History().runs, History().max_age, History().arguments) == (100_000, 7 * 86_400, "masked")
    for sentence in (
        f"groups of up to {history.GROUP_RUNS}",
        f"when {recorder.FLUSH_RUNS} runs wait",
        f"bounds the number, up to {MOST_RUNS:,}",
        f"in up to {SEGMENTS} segments (more of them above {SEGMENTS * LARGEST_SEGMENT:,} runs)",
        f"at most {reading.GROUPS_PER_PAGE} groups in one transaction",
        f"up to {recorder.MOST_BYTES // 1_000_000} MB of texts",
        f"up to {recorder.ARGUMENTS_LENGTH:,} characters",
        f"the first {recorder.ERROR_LENGTH:,} characters, and the last {recorder.TRACEBACK_LENGTH:,} of the traceback",
        *STATES,
    ):
        assert sentence in said(DOCS / "history.md"), sentence
    assert (recorder.FLUSH_S, recorder.INTERVAL_S) == (1.0, 30.0)  # "once a second", "half a minute"
    assert LONGEST_AGE_S == 366 * 86_400  # "up to a year"
    assert f"The {by_task.TASKS} tasks that ran most" in said(METRICS)
    for sentence in (
        f"over {records.INLINE_BYTES:,} bytes",
        f"in parts of {store.SWEEP_ROWS}",
        f"after {chords.CLAIM_MS // 1000} s, then less often, each ten minutes",
        f"each {backend.INTERVAL_S:.0f} s",
    ):
        assert sentence in said(RESULTS), sentence
    assert chords.LONGEST_LOOK_MS == 600_000


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
    for (page, mark), table in TABLES.items():
        page.write_text(block(mark).sub(lambda _, table=table: table(), page.read_text()))
