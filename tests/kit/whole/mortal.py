"""A process that is killed just after one of its commits."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest

from kombu_fdb.store.protocol import Database, Transaction

#: Names of the numbers that say how much one transaction does of a verb in parts.
_PARTS = re.compile(r"[A-Z]+_PER_(TRANSACTION|PURGE|PART|FORGET|FOLD)")


class Killed(BaseException):
    """The process."""


class MortalDatabase:
    """A process's way to a store of which no commit's answer is ever lost, until the process dies."""

    commit_may_be_unknown = True
    writers_take_turns = False

    def __init__(self, inner: Database, most_commits: float = math.inf) -> None:
        self._inner = inner
        self._most = most_commits
        self.commits = 0

    def begin(self, *, timeout_s: float, read_only: bool = False) -> Any:
        if self.commits >= self._most:
            raise Killed  # what it still tries to do on its way out
        return _Transaction(self._inner.begin(timeout_s=timeout_s, read_only=read_only), self)

    def committed(self) -> None:
        self.commits += 1
        if self.commits >= self._most:
            raise Killed

    def close(self) -> None:
        self._inner.close()


class _Transaction:
    def __init__(self, inner: Transaction, way: MortalDatabase) -> None:
        self._inner = inner
        self._way = way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def commit(self) -> None:
        writes = not self._inner.read_only
        self._inner.commit()
        if writes:
            self._way.committed()


def small_parts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let each verb in parts do so little in a transaction that a small store takes it many."""
    for name, module in list(sys.modules.items()):
        if name.startswith("kombu_fdb.engine"):
            for constant in filter(_PARTS.fullmatch, list(vars(module))):
                monkeypatch.setattr(module, constant, size)
