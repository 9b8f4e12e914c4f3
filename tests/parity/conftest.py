"""Stores for the seeds' tests: ``broker`` through the public API and in real time, over each store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kombu_fdb import Broker


@pytest.fixture
def url(any_store: str) -> str:
    return any_store


@pytest.fixture
def broker(another: Callable[..., Broker]) -> Broker:
    return another()


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept: None) -> None:
    """In each test here."""
