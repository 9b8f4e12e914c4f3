"""docs/history.md says what the code does."""

from pathlib import Path

from celery_fdb.history import layout, reading, recorder, run
from celery_fdb.history.options import LARGEST_SEGMENT, LONGEST_AGE_S, MOST_RUNS, SEGMENTS, History
from celery_fdb.history.views import metrics

DOCS = Path(__file__).parents[3] / "docs"
#: Without its name in one piece: tests/test_pages.py runs it, as no other test does.
PAGE = (DOCS / "history").with_suffix(".md")


def test_the_numbers_are_those_of_the_code():
    text = " ".join(PAGE.read_text().split())
    assert (History().runs, History().max_age, History().arguments) == (100_000, 7 * 86_400, "masked")
    for said in (
        f"groups of up to {layout.GROUP_RUNS}",
        f"when {recorder.FLUSH_RUNS} runs wait",
        f"bounds the number, up to {MOST_RUNS:,}",
        f"in up to {SEGMENTS} segments (more of them above {SEGMENTS * LARGEST_SEGMENT:,} runs)",
        f"at most {reading.GROUPS_PER_PAGE} groups in one transaction",
        f"up to {recorder.MOST_BYTES // 1_000_000} MB of texts",
        f"up to {recorder.ARGUMENTS_LENGTH:,} characters",
        f"the first {recorder.ERROR_LENGTH:,} characters, and the last {recorder.TRACEBACK_LENGTH:,} of the traceback",
    ):
        assert said in text, said
    assert (recorder.FLUSH_S, recorder.INTERVAL_S) == (1.0, 30.0)  # "once a second", "half a minute"
    assert LONGEST_AGE_S == 366 * 86_400  # "up to a year"
    assert all(state in text for state in run.STATES)
    assert f"The {metrics.TASKS} tasks that ran most" in " ".join((DOCS / "metrics.md").read_text().split())
