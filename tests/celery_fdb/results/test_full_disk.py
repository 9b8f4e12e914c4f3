"""Results in a broker's file that messages have filled."""

import pytest
from kit.disks import small_disk

from celery_fdb.results.store import ResultStore
from kombu_fdb.api.broker import Broker
from kombu_fdb.errors import StoreFull
from kombu_fdb.primitives.clock import Clock
from kombu_fdb.process.client import close_clients

PATIENCE_S = 60.0
LATER_MS = 4_000_000_000_000


def test_a_worker_stores_results_while_it_empties_a_full_disk(tmp_path):
    """It stored none until there was space, and made none: a late ack follows the result."""
    patience = dict.fromkeys(("connect_timeout", "operation_timeout", "publish_timeout"), PATIENCE_S)
    with small_disk(tmp_path / "disk", 3) as disk:
        with Broker.open(f"fdb+sqlite:///{disk}/b.db", **patience) as broker:
            queue = broker.queue("q")
            queue.put_many([b"x" * 1_000] * 60)
            for size in (20_000, 1_000, 10):
                with pytest.raises(StoreFull):
                    while True:
                        broker.queue("others").put(b"x" * size)
            results = ResultStore(broker.database, "results", clock=Clock(), timeout_s=PATIENCE_S)
            for number, job in enumerate(queue.take_many(60, timeout=PATIENCE_S)):
                results.store(f"task-{number}", "SUCCESS", b"1" * 100, LATER_MS)
                assert results.exists(f"task-{number}")
                job.ack()
        close_clients()
