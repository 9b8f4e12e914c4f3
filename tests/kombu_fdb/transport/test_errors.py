"""What an error of the transport leaves behind."""

import pytest
from kit.frames import keeps_frames

from kombu_fdb.errors import FormatError, QueueNotFound, StoreUnavailable
from kombu_fdb.transport.connection import run_all
from kombu_fdb.transport.errors import amqp_errors


def fail(kind):
    raise kind


@pytest.mark.parametrize("kind", [StoreUnavailable, QueueNotFound, FormatError])
def test_an_error_of_amqp_s_lets_its_callers_go(kind):
    assert not keeps_frames(lambda: amqp_errors("basic_publish")(fail)(kind))


def test_a_failed_clean_up_lets_its_callers_go():
    assert not keeps_frames(lambda: run_all([lambda: fail(StoreUnavailable), lambda: fail(FormatError)]))
