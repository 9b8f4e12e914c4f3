"""What fails is set aside: how soon a duty with such subjects is called again, and when a failure is reported."""

from unittest.mock import Mock

import pytest
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase

from kombu_fdb.engine.parts import Budget
from kombu_fdb.errors import StoreFull, StoreUnavailable
from kombu_fdb.process.duties import ASIDE_PAUSE_S, LEFT_TTL_S, LOOK_S, Guard, routine
from kombu_fdb.process.duty_cycle import _warn

MANY = 100


class Failures:
    """A duty with many subjects, all of which fail with ``error``, if any."""

    def __init__(self, error):
        self.error = error
        self.reported = []
        self.recovered = []
        self._bench = Bench(FaultyDatabase())
        self.upkeep = self._bench.engine.upkeep
        self._guard = Guard(self.upkeep, self._bench.clock, lambda _duty, *told: self._note(*told))
        self._duty = routine("work", lambda: [f"{number:03}" for number in range(MANY)], self._step, LOOK_S)

    def _note(self, subject, error):
        (self.recovered if error is None else self.reported).append(subject)

    def _step(self, _):
        if self.error is not None:
            raise self.error

    def run(self):
        """A round after which all subjects had their turns. Returns the pause until the next one."""
        for _ in range(2):
            pause_s = self._duty.run(self._guard, Budget(self._bench.clock, transactions=MANY * 2 // 3))
        return pause_s

    def later(self, seconds):
        self._bench.later(seconds)


def test_more_subjects_than_a_turn_has_transactions_do_not_keep_a_process_busy():
    failures = Failures(ValueError())
    assert failures.run() == LOOK_S
    assert failures.run() == LOOK_S
    assert len(failures.reported) == MANY


@pytest.mark.parametrize(("pause_s", "times"), [(ASIDE_PAUSE_S, 1), (LEFT_TTL_S, 1), (ASIDE_PAUSE_S + LEFT_TTL_S, 2)])
def test_what_fails_again_long_after_is_reported_again(pause_s, times):
    """Its subject may have been gone meanwhile: a queue that was deleted and declared again."""
    failures = Failures(ValueError())
    failures.run()
    failures.later(pause_s)
    failures.run()
    assert len(failures.reported) == MANY * times


def test_a_subject_that_is_gone_is_forgotten():
    bench = Bench(FaultyDatabase())
    guard = Guard(bench.engine.upkeep, bench.clock, lambda *_: None)
    for subject in ("deleted", "still there"):
        guard.attempt("work", subject, Mock(side_effect=ValueError))
        bench.later(ASIDE_PAUSE_S + LEFT_TTL_S)
    assert [*guard._failing] == [("work", "still there")]


def test_what_has_recovered_is_reported_when_it_fails_again():
    failures = Failures(ValueError())
    for error in (ValueError(), None, ValueError()):
        failures.error = error
        failures.run()
        failures.later(ASIDE_PAUSE_S)
    assert len(failures.reported) == MANY * 2


def test_the_log_names_the_duty_and_its_subject(caplog):
    """With a traceback where the error does not say it all."""
    for error in (ValueError("damaged"), StoreFull(), None):
        _warn("work", "q", error)
    assert caplog.messages == [
        "the duty 'work' of 'q' failed, is set aside and will be retried: damaged",
        f"the duty 'work' of 'q' failed, is set aside and will be retried: {StoreFull()}",
        "the duty 'work' of 'q' succeeded again",
    ]
    assert [bool(each.exc_info) for each in caplog.records] == [True, False, False]


def test_what_has_recovered_is_told(monkeypatch):
    """Also if the store did not answer when its entry was to be cleared; it then stays until it is."""
    failures = Failures(ValueError())
    failures.run()
    failures.error = None
    failures.later(ASIDE_PAUSE_S)
    with monkeypatch.context() as patch:
        patch.setattr(failures.upkeep, "forget_aside", Mock(side_effect=StoreUnavailable))
        with pytest.raises(StoreUnavailable):
            failures.run()
    assert len(failures.upkeep.asides()) == MANY
    failures.run()
    assert not failures.upkeep.asides()
    assert failures.recovered == [f"{number:03}" for number in [*range(1, MANY), 0]]


def test_a_full_disk_before_hides_no_failure():
    full = StoreFull()
    full.moves = True
    failures = Failures(full)
    failures.run()
    assert failures.reported == ["000"], "once for all subjects"
    failures.error = ValueError()
    failures.later(ASIDE_PAUSE_S)
    failures.run()
    assert len(failures.reported) == 1 + MANY
