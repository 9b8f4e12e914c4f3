"""Each sentence that promises something stands in the ledger, with the test that fails if it is false."""

import ast
from functools import cache

from kit.ledger import LEDGER, ROOT, promises, read

#: Of a sentence that has one of the words and promises nothing.
NO_PROMISE = "-"


def test_the_ledger_names_each_promise():
    """``PYTHONPATH=tests python -m kit.ledger`` prints the lines that are missing."""
    assert {(entry.where, entry.sentence) for entry in read()} == promises()


def test_the_ledger_is_sorted_and_names_each_once():
    lines = LEDGER.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))


def test_the_tests_of_the_ledger_exist():
    named = {entry.test for entry in read()} - {NO_PROMISE}
    assert not sorted(each for each in named if not _exists(each))


def _exists(test):
    path, *names = test.split("::")
    return bool(names) and (ROOT / path).is_file() and tuple(names) in _tests(ROOT / path)


@cache
def _tests(path):
    """Those of a file, of which a class is one, too."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add((node.name,))
            found |= {
                (node.name, each.name) for each in ast.iter_child_nodes(node) if isinstance(each, ast.FunctionDef)
            }
    return found
