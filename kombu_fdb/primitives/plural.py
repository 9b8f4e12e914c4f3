"""Numbers in sentences: "1 message", "2 messages"."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """The number, with separators, and its noun, given in the singular; its plural ends in ``s``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
