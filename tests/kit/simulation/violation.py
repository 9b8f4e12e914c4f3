"""What a simulation finds."""

from __future__ import annotations


class Violation(AssertionError):
    """A guarantee does not hold. ``guarantee`` is its tag."""

    def __init__(self, guarantee: str, text: str) -> None:
        super().__init__(f"{guarantee}: {text}")
        self.guarantee = guarantee
