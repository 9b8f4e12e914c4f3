"""The steps of the two threads that keep a session."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.process.session_threads import Trouble
from kombu_fdb.process.upkeep.duty_cycle import Turns


def test_deferred_calls_are_made_although_a_duty_is_refused() -> None:
    """On a full disk one can be in each round, for hours."""
    duties, deferred = MagicMock(), MagicMock()
    duties.run_once.side_effect = StoreUnavailable("the disk is full")
    engine: Any = MagicMock()
    with pytest.raises(StoreUnavailable):
        Turns(engine, MagicMock(), duties, deferred, ttl_s=1.0).serve(rang=False)
    deferred.assert_called_once_with()


def test_the_end_of_a_trouble_is_told_in_words_that_suit_one_and_many(caplog: pytest.LogCaptureFixture) -> None:
    """It said that the duties works again."""
    for what in ("the duties", "the heartbeat to the store"):
        trouble = Trouble(what)
        trouble.begins(StoreUnavailable())
        trouble.ends()
    assert caplog.messages[1::2] == ["the duties succeeded again", "the heartbeat to the store succeeded again"]
