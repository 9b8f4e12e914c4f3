"""Stores for the seeds' tests: ``broker`` through the public API and in real time, over each store."""

import pytest


@pytest.fixture
def url(any_store):
    return any_store


@pytest.fixture
def broker(another):
    return another()


@pytest.fixture(autouse=True)
def _jobs_are_kept(jobs_are_kept):
    """In each test here."""
