"""The sentences that promise something: in the README, in docs and in docstrings, with the test that fails if they lie.

``tests/ledger.tsv`` has a line for each: where it stands, the test, the sentence. A sentence is a promise if it says
one of :data:`WORDS`. ``PYTHONPATH=tests python -m kit.ledger`` prints the lines that are missing, with ``?`` for the
test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "tests" / "ledger.tsv"
WORDS = re.compile(r"\b(never|at most|(?:does|do) not depend|as (?:in )?RabbitMQ|keeps)\b", re.IGNORECASE)
#: What holds no promise of ours: the story of what was changed, what was measured, and the words themselves.
WITHOUT = {"docs/benchmarks.md", "docs/glossary.md"}
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
#: A sentence ends before white space, a cell of a table with its bar, a paragraph or an item with its line.
_END = re.compile(r"(?<=[.!?:])[*_)]*\s+(?=[A-Z*`_\[(\d\"])|\s*\|\s*|\n\s*\n|\n\s*(?:[*#>-]|\d+\.)\s+")


class Entry(NamedTuple):
    """``where``: a file of the project."""

    where: str
    test: str
    sentence: str


def promises(root: Path = ROOT) -> set[tuple[str, str]]:
    """File and sentence of each."""
    return {
        (where, sentence)
        for where, text in [*_pages(root), *_docstrings(root)]
        for each in _END.split(_FENCE.sub("\n\n", text))
        if WORDS.search(sentence := " ".join(each.split()))
    }


def read() -> list[Entry]:
    """What the ledger says."""
    return [Entry(*line.split("\t")) for line in LEDGER.read_text(encoding="utf-8").splitlines()]


def _pages(root: Path) -> Iterator[tuple[str, str]]:
    for path in [root / "README.md", root / "SECURITY.md", *sorted((root / "docs").rglob("*.md"))]:
        where = path.relative_to(root).as_posix()
        if where not in WITHOUT:
            yield where, path.read_text(encoding="utf-8")


def _docstrings(root: Path) -> Iterator[tuple[str, str]]:
    for package in ("kombu_fdb", "celery_fdb"):
        for path in sorted((root / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield path.relative_to(root).as_posix(), ast.get_docstring(node) or ""


if __name__ == "__main__":
    known = {(entry.where, entry.sentence) for entry in (read() if LEDGER.exists() else [])}
    for where, sentence in sorted(promises() - known):
        print(where, "?", sentence, sep="\t")
