from __future__ import annotations

from collections.abc import Iterator

import pytest

from .box import Box, box_unavailable_reason

#: On a busy machine its tests, and what its worker of xdist runs besides, take long; it ends with that worker.
LONGEST_S = 7200.0


@pytest.fixture(scope="session")
def box() -> Iterator[Box]:
    """Five servers in three zones; who does something to them heals it. Its test has the mark ``foundationdb``."""
    if reason := box_unavailable_reason():
        pytest.skip(reason)
    with Box(longest_s=LONGEST_S) as box:
        yield box
