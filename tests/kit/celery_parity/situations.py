"""The table: what a task does, with which settings, how it is called, and how its worker ends meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Of a task that waits: the worker should have ended before.
DELAY_S = 5
#: Options of a task.
SETTINGS: dict[str, dict[str, Any]] = {
    "early": {},
    "late": {"acks_late": True},
    "late_lost": {"acks_late": True, "reject_on_worker_lost": True},
    "late_kept": {"acks_late": True, "acks_on_failure_or_timeout": False},
    "late_failure_kept": {"acks_late": True, "acks_on_failure": False},
    "late_timeout_kept": {"acks_late": True, "acks_on_timeout": False},
    "late_lost_retried": {"acks_late": True, "retry_on_worker_lost": True, "default_retry_delay": 0},
    "ignored": {"ignore_result": True},
    "ignored_late": {"ignore_result": True, "acks_late": True},
    "ignored_errors": {"ignore_result": True, "store_errors_even_if_ignored": True},
    "started": {"track_started": True},
}


@dataclass(frozen=True)
class Situation:
    """``behaviour``: a function of the application. ``call``: one of the stage's. ``ending``: of its worker."""

    behaviour: str
    setting: str
    call: str = "plain"
    ending: str = "idle"

    @property
    def name(self) -> str:
        parts = [self.ending, self.call, self.behaviour, self.setting]
        return "-".join(part for part in parts if part not in {"idle", "plain"})

    @property
    def scene(self) -> str:
        """Whose workers and queue it shares. A worker that may end by itself plays one situation."""
        return self.name if self.ending == "fatal" else self.ending

    @property
    def task(self) -> str:
        return f"{self.behaviour} {self.setting}"

    def id_of(self, role: str = "task") -> str:
        """Of a task that takes part: what it is to the situation stands in its id."""
        return f"{self.name}.{role}"


#: Each with early and with late acks.
BEHAVIOURS = (
    "ok",
    "fail",
    "fail_with_what_is_no_error",
    "retry_once",
    "retry_for_ever",
    "retry_by_itself",
    "retry_without_raising",
    "retry_later",
    "ignore",
    "ignore_with_a_state",
    "reject",
    "requeue_once",
    "die_once",
    "leave_once",
    "overrun_softly",
    "catch_a_soft_limit",
    "overrun",
    "replace_itself",
    "replace_itself_by_a_group",
    "replace_itself_by_a_failure",
    "return_what_cannot_be_encoded",
    "raise_what_cannot_be_encoded",
    "fail_before_it_starts",
    "fail_in_on_success",
    "fail_in_on_failure",
    "fail_in_after_return",
)
#: What other settings change.
SET = (
    ("ok", "ignored"),
    ("ok", "ignored_late"),
    ("ok", "started"),
    ("fail", "ignored"),
    ("fail", "ignored_late"),
    ("fail", "ignored_errors"),
    ("fail", "started"),
    ("fail", "late_kept"),
    ("fail", "late_failure_kept"),
    ("fail", "late_timeout_kept"),
    ("fail_in_on_failure", "late_kept"),
    ("fail_in_on_failure", "late_failure_kept"),
    ("retry_for_ever", "ignored"),
    ("retry_for_ever", "late_kept"),
    ("ignore", "started"),
    ("ignore", "late_kept"),
    ("reject", "ignored"),
    ("reject", "started"),
    ("die_once", "late_lost"),
    ("die_once", "late_kept"),
    ("die_once", "late_lost_retried"),
    ("die_once", "ignored_late"),
    ("leave_once", "late_lost"),
    ("overrun_softly", "late_kept"),
    ("overrun_softly", "late_timeout_kept"),
    ("overrun_once", "late_kept"),
    ("overrun_once", "late_timeout_kept"),
    ("overrun", "late_failure_kept"),
    ("overrun", "ignored"),
    ("overrun_and_fail_in_on_failure", "early"),
    ("overrun_and_fail_in_on_failure", "late"),
)
CALLS = (
    ("expired", "ok", "early"),
    ("expired", "ok", "late"),
    ("expired", "ok", "ignored"),
    ("delayed", "ok", "early"),
    ("delayed", "ok", "late"),
    ("delayed_past_its_expiry", "ok", "late"),
    ("revoked_before", "ok", "early"),
    ("revoked_before", "ok", "late"),
    ("revoked_while_it_waits", "ok", "early"),
    ("revoked_while_it_waits", "ok", "late"),
    ("revoked_by_a_stamp", "ok", "early"),
    ("revoked_by_a_stamp", "ok", "late"),
    ("terminated", "hold", "early"),
    ("terminated", "hold", "late"),
    ("terminated", "hold", "late_lost"),
    ("killed", "hold", "early"),
    ("killed", "hold", "late"),
    ("killed", "hold", "late_lost"),
    ("unknown", "ok", "early"),
    ("link", "ok", "early"),
    ("link", "fail", "early"),
    ("link", "retry_once", "late"),
    ("link", "replace_itself", "early"),
    ("link", "die_once", "late_lost"),
    ("link", "ignore", "early"),
    ("link", "ok", "ignored"),
    ("link_error", "ok", "early"),
    ("link_error", "fail", "early"),
    ("link_error", "fail", "ignored"),
    ("link_error", "retry_for_ever", "late"),
    ("link_error", "reject", "early"),
    ("link_error", "overrun", "late"),
    ("link_error", "die_once", "late"),
    ("link_error", "replace_itself_by_a_failure", "early"),
    ("link_error_inline", "fail", "early"),
    ("link_error_inline", "overrun", "early"),
    ("chain", "ok", "early"),
    ("chain", "fail", "late"),
    ("chain", "retry_once", "late"),
    ("chain", "replace_itself", "late"),
    ("chain", "ignore", "early"),
    ("chain", "reject", "early"),
    ("group", "ok", "early"),
    ("group", "fail", "early"),
    ("chord", "ok", "early"),
    ("chord", "ok", "late"),
    ("chord", "fail", "early"),
    ("chord", "retry_once", "late"),
    ("chord", "retry_for_ever", "late"),
    ("chord", "reject", "early"),
    ("chord", "overrun", "late"),
    ("chord", "die_once", "late"),
    ("chord", "die_once", "late_lost"),
    ("chord", "replace_itself", "early"),
    ("chord", "replace_itself_by_a_group", "early"),
    ("chord", "replace_itself_by_a_failure", "early"),
    ("chord", "join_its_chord", "early"),
    ("chord_with_an_expired_member", "ok", "early"),
    ("chord_with_a_revoked_member", "ok", "early"),
    ("chord_into", "fail", "early"),
    ("chord_into", "retry_once", "late"),
    ("chord_into", "replace_itself", "late"),
    ("chord_into_a_group", "ok", "early"),
    ("chord_into_a_group", "fail", "early"),
    ("chord_of_chains", "ok", "early"),
    ("chord_of_chains", "fail", "early"),
    ("chord_of_chords", "ok", "early"),
    ("chord_of_chords", "fail", "early"),
    ("chord_of_chords_into_groups", "ok", "early"),
    ("chord_of_chords_into_groups", "fail", "early"),
    ("chord_of_chains_into_groups", "ok", "early"),
    ("chord_of_chains_into_groups", "fail", "early"),
    ("chord_of_chains_from_groups_into_groups", "fail", "early"),
    ("chord_of_groups", "ok", "early"),
    ("chord_of_groups", "fail", "early"),
    ("chain_with_a_chord", "ok", "early"),
    ("chain_with_a_chord", "fail", "early"),
)
#: The worker may not survive these.
FATAL = (
    ("plain", "run_out_of_memory", "early"),
    ("plain", "run_out_of_memory", "late"),
    ("plain", "run_out_of_memory", "late_kept"),
    ("plain", "run_out_of_memory", "ignored_late"),
    ("link_error", "run_out_of_memory", "late"),
    ("chord", "run_out_of_memory", "late"),
    ("plain", "exit", "early"),
    ("plain", "exit", "late"),
    ("plain", "exit", "late_lost"),
    ("plain", "interrupt", "early"),
    ("plain", "interrupt", "late"),
)
#: SIGTERM, SIGQUIT and SIGKILL of a worker that has four processes: what runs, and what has not begun.
ENDINGS = ("warm", "cold", "lost")
HELD = ("early", "late", "late_lost", "started")
WAITING = (("plain", "ok", "early"), ("plain", "ok", "late"), ("link", "ok", "late"), ("chord", "ok", "late"))
TIMED = (("delayed", "ok", "late"), ("delayed", "ok", "early"), ("plain", "retry_later", "late"))


def _all() -> Iterator[Situation]:
    for behaviour in BEHAVIOURS:
        yield Situation(behaviour, "early")
        yield Situation(behaviour, "late")
    for behaviour, setting in SET:
        yield Situation(behaviour, setting)
    for call, behaviour, setting in CALLS:
        yield Situation(behaviour, setting, call)
    for call, behaviour, setting in FATAL:
        yield Situation(behaviour, setting, call, "fatal")
    for ending in ENDINGS:
        for call, behaviour, setting in TIMED:
            yield Situation(behaviour, setting, call, ending)
        for setting in HELD:
            yield Situation("hold", setting, "plain", ending)
        for call, behaviour, setting in WAITING:
            yield Situation(behaviour, setting, call, ending)


SITUATIONS = tuple(_all())
