"""``docs/architecture.md`` names functions; each must be where the page says it is."""

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
NAMES = sorted(set(re.findall(r"`((?:kombu_fdb|celery_fdb)(?:\.\w+)+)`", PAGE)))
WALKS = ("Publish", "Claim", "Ack", "Sweep")


def find(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(f"no package of ours: {name}")


def test_what_the_page_names_exists():
    for name in NAMES:
        assert find(name) is not None, name


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_has_five_steps_through_eight_files_at_most(walk):
    section = PAGE.split(f"## {walk}\n")[1].split("\n## ")[0]
    assert re.findall(r"^(\d)\. ", section, re.MULTILINE) == list("12345")
    named = set(re.findall(r"`((?:kombu_fdb|celery_fdb)(?:\.\w+)+)`", section))
    files = {re.match(r"(?:\.?[a-z_]+)+(?=\.[A-Z]|\.\w+$)", each).group() for each in named}
    assert 0 < len(files) <= 8
