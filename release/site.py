"""What the site needs beyond its pages: links to files outside of ``docs``, and docstrings as Markdown.

The pages are written for a reader of the repository, so they link to ``../README.md`` and ``../examples``. On the site
such a link leads into the repository. Docstrings are plain text with reStructuredText's roles and ``::`` blocks; the
reference shows them as Markdown.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)(#[^)]*)?\)")
#: From one border of ``=`` to the next empty line.
TABLE = re.compile(r"^=+(?: +=+)+\n(?:.+\n)+", re.MULTILINE)
ROLE = re.compile(r":(?:class|meth|func|mod|data|attr|exc|ref):`[~.]*([^`]+)`")


def repository() -> str:
    """The URL that pyproject.toml has, in its one place."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    url: str = settings["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    return url


def on_config(config: Any) -> Any:
    """MkDocs has read mkdocs.yml, where the repository is not named a second time."""
    config.repo_url = repository()
    config.repo_name = config.repo_url.partition("://")[2].partition("/")[2]
    config.edit_uri = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """MkDocs is about to render a page."""
    del config, files
    return LINK.sub(lambda match: _into_the_repository(match, Path(page.file.src_uri).parent), markdown)


def _into_the_repository(link: re.Match[str], folder: Path) -> str:
    path = (ROOT / "docs" / folder / link[1]).resolve()
    if path.is_relative_to(ROOT / "docs"):
        return link[0]
    kind = "tree" if path.is_dir() else "blob"
    return f"]({repository()}/{kind}/main/{path.relative_to(ROOT)}{link[2] or ''})"


class PlainDocstrings(griffe.Extension):
    """Every docstring that the reference shows."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Griffe has read a module, class, function or attribute."""
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Roles become code, tables stay as they are, and ``::`` is a colon or nothing: Markdown sees the indentation."""
    text = ROLE.sub(r"`\1`", text)
    text = TABLE.sub(lambda match: f"```text\n{match[0].replace('``', '')}```\n", f"{text}\n")
    text = re.sub(r"^::$\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)
