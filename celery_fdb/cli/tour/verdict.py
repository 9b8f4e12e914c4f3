"""Did all happen that should have, as often as it should have? Pure functions of what was sent and of the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


class Entry(NamedTuple):
    """A line of the journal."""

    what: str
    #: Seconds after it was sent, or after its ETA.
    waited_s: float
    #: The process group of its worker.
    worker: int


def entries(journal: str) -> list[Entry]:
    lines = (line.split("\t") for line in journal.splitlines())
    return [Entry(what, float(waited_s), int(worker)) for what, waited_s, worker in lines]


class Check(NamedTuple):
    claim: str
    holds: bool
    found: str


@dataclass(frozen=True)
class Outcome:
    """All there is to judge by: what was sent, what ran, the worker that was killed, and the chord's result."""

    sent: Sequence[str]
    ran: Sequence[Entry]
    killed: int
    articles: int
    counted: object

    @property
    def lost(self) -> int:
        return len(set(self.sent) - {each.what for each in self.ran})

    def checks(self) -> list[Check]:
        return [self._all_ran(), self._twice(), self._chord(), self._retries(), self._surveys()]

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """By task: how many were sent, ended once and more than once, and their median time in seconds."""
        ends = Counter(each.what for each in self.ran)
        for task in dict.fromkeys(each.split()[0] for each in self.sent):
            mine = [ends[each] for each in self.sent if each.split()[0] == task]
            waited = [each.waited_s for each in self.ran if each.what.split()[0] == task]
            often = sum(each > 1 for each in mine)
            yield task, f"{len(mine):,}", f"{mine.count(1):,}", f"{often:,}", f"{median(waited or [0]):.2f}"

    def _all_ran(self) -> Check:
        return Check("all that was sent has run", not self.lost, f"{len(self.sent):,} sent, {self.lost} lost")

    def _twice(self) -> Check:
        """A worker may be killed between a task's end and its ack: such a task runs again, and no other does."""
        ends = Counter(each.what for each in self.ran)
        at_killed = {each.what for each in self.ran if each.worker == self.killed}
        wrong = sorted(what for what in set(self.sent) - at_killed if ends[what] > 1)
        again = sum(number - 1 for what, number in ends.items() if what.startswith("begin "))
        found = _listed(wrong) or f"{again} stocktakings were begun again"
        return Check("only what a killed process had begun ran again", not wrong and again > 0, found)

    def _chord(self) -> Check:
        return Check(
            "the chord ran once, with all results",
            self.counted == self.articles and sum(each.what == "inventory 0" for each in self.ran) == 1,
            f"{self.counted} articles",
        )

    def _retries(self) -> Check:
        tries: dict[str, list[float]] = {}
        for each in self.ran:
            if each.what.startswith("try "):
                tries.setdefault(each.what, []).append(each.waited_s)
        wrong = [what for what, (first, *later) in tries.items() if not _apart(first, later)]
        found = _listed(wrong) or f"{len(tries)} payments"
        return Check("what failed was tried again after 1 s and 2 s", bool(tries) and not wrong, found)

    def _surveys(self) -> Check:
        late = [each.waited_s for each in self.ran if each.what.startswith("survey ")]
        first_s = min(late, default=-1)
        return Check("nothing ran before its ETA", first_s >= 0, f"the first survey {first_s:.2f} s after it")


def _apart(first_s: float, later_s: Sequence[float]) -> bool:
    return len(later_s) >= 2 and later_s[0] - first_s >= 1 and later_s[1] - later_s[0] >= 2


def _listed(wrong: Iterable[str]) -> str:
    return f"wrong: {', '.join(wrong)}" if wrong else ""
