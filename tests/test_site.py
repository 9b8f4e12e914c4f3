"""The site builds without a warning: every link and anchor leads somewhere, every docstring of the reference is found.

Where MkDocs is not installed, as in most test environments, this is skipped; ``make docs`` has it.
"""

import os
import re
from html import unescape
from pathlib import Path

import pytest
from kit.processes import run_python

pytest.importorskip("mkdocs", reason="mkdocs is not installed; make docs runs this")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed; make docs runs this")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run_python("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder, cwd=ROOT, env=environ)
    return folder


def test_every_page_is_there(site):
    for page in (ROOT / "docs").glob("**/*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix("")
        assert (site / ("index.html" if path == Path("index") else path / "index.html")).exists(), path


def test_links_out_of_the_docs_lead_into_the_repository(site):
    text = (site / "quickstart" / "index.html").read_text()
    assert re.search(r'href="https://[^"]+/blob/main/SECURITY\.md"', text)
    assert "../SECURITY" not in text


def test_the_reference_has_the_docstrings(site):
    text = unescape((site / "reference" / "broker" / "index.html").read_text())
    assert 'id="kombu_fdb.api.queue.Queue.put"' in text
    assert "Store a job and return its id." in text


def test_no_markup_of_docstrings_is_left(site):
    for page in (site / "reference").glob("*/index.html"):
        assert not re.search(r":(class|meth|func|mod|attr|exc):|<p>==|::</p>", page.read_text()), page


def test_nothing_is_loaded_from_elsewhere(site):
    """No fonts, scripts or pictures; and nothing for which the theme's own script loads one, as for diagrams."""
    for page in site.glob("**/*.html"):
        text = page.read_text()
        assert not re.search(r'<(script|iframe|img)[^>]+src="(https?:)?//', text), page
        assert not re.search(r'<link[^>]+href="https?:[^"]+\.(js|css|woff2?)"', text), page
        assert 'class="mermaid"' not in text, page


def test_the_reference_begins_with_what_is_called_first(site):
    text = (site / "reference" / "broker" / "index.html").read_text()
    for owner, first in (("broker.Broker", "open"), ("queue.Queue", "put")):
        found = re.findall(rf'<h\d id="kombu_fdb\.api\.{owner}\.([^"]+)"', text)
        assert found[0] == first
