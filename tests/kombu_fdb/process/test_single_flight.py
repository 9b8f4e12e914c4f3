"""One attempt for all threads of a process."""

from kit.frames import keeps_frames

from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.process.client import SingleFlight


def test_a_failed_attempt_lets_its_callers_go():
    flight = SingleFlight[str](lambda: None)

    def work():
        raise StoreUnavailable

    assert not keeps_frames(lambda: flight.run(work, 1.0))
