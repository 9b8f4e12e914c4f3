"""All that the engine must do, over any store. A test module imports these suites and has a fixture ``database``."""

from __future__ import annotations

from kit.conformance.duties import DutiesConformance as TestDuties
from kit.conformance.limits import LimitsConformance as TestLimits
from kit.conformance.newer import NewerConformance as TestNewer
from kit.conformance.operators import OperatorsConformance as TestOperators
from kit.conformance.queue import QueueConformance as TestQueue
from kit.conformance.turns import TurnsConformance as TestTurns
from kit.conformance.wait_queues import WaitQueueConformance as TestLines

__all__ = ["TestDuties", "TestLimits", "TestLines", "TestNewer", "TestOperators", "TestQueue", "TestTurns"]
