"""The README as the package index shows it, and the project's URLs.

The index knows no files beside the README, so a link to ``docs/cli.md`` leads nowhere there. While a wheel or an sdist
is built, each relative link becomes an absolute one into the repository, at the tag of the version that is built. The
repository's URL stands in one place: ``[tool.hatch.metadata.hooks.custom]`` of pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: ``](target)`` of a link or picture whose target is neither absolute nor an anchor of the same page.
RELATIVE = re.compile(r"\]\((?!https?:|#|mailto:)([^)]+)\)")
PICTURES = (".png", ".svg", ".gif")
#: Of GitHub's own pages, as in ``../../actions``: that is how a page of the repository links to its siblings.
SIBLING = "../../"


class ReadmeOfTheIndex(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with ``[project]``."""
        repository = self.config["repository"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, repository, f"v{metadata['version']}"),
        }
        metadata["urls"] = urls(repository)


def absolute(text: str, repository: str, ref: str) -> str:
    """``text`` with every relative link leading into ``repository``, at the branch or tag ``ref``."""
    return RELATIVE.sub(lambda match: f"]({target(match[1], repository, ref)})", text)


def target(relative: str, repository: str, ref: str) -> str:
    if relative.startswith(SIBLING):
        return f"{repository}/{relative.removeprefix(SIBLING)}"
    path = relative.partition("#")[0]
    kind = "raw" if path.endswith(PICTURES) else "blob"
    return f"{repository}/{kind}/{ref}/{relative}"


def urls(repository: str) -> dict[str, str]:
    """What the index lists beside the README."""
    return {
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Security": f"{repository}/security/policy",
    }
