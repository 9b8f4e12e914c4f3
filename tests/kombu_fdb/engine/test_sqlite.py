"""The queue's conformance suite over the embedded store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.conformance.duties import DutiesConformance
from kit.conformance.limits import LimitsConformance
from kit.conformance.lines import LineConformance
from kit.conformance.newer import NewerConformance
from kit.conformance.operators import OperatorsConformance
from kit.conformance.queue import QueueConformance
from kit.conformance.turns import TurnsConformance

from kombu_fdb.store.sqlite.database import SqliteDatabase


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteDatabase]:
    path: Path = tmp_path_factory.mktemp("queue") / "broker.db"
    database = SqliteDatabase.open(str(path))
    yield database
    database.close()


class TestSqlite(QueueConformance):
    pass


class TestSqliteLimits(LimitsConformance):
    pass


class TestSqliteDuties(DutiesConformance):
    pass


class TestSqliteNewer(NewerConformance):
    pass


class TestSqliteTurns(TurnsConformance):
    pass


class TestSqliteLines(LineConformance):
    pass


class TestSqliteOperators(OperatorsConformance):
    pass
