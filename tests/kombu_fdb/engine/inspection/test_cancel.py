"""A task id that a publisher has given to many messages: found in part, taken back in parts."""

from kombu_fdb import Broker
from kombu_fdb.engine.inspection import browse


def test_many_messages_of_one_id_cost_no_more_than_some(tmp_path, monkeypatch):
    monkeypatch.setattr(browse, "MOST_OF_TASK", 3)
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        jobs = broker.queue("jobs")
        for number in range(8):
            jobs.put(str(number), task_id="nightly")
        jobs.put("another", task_id="nightly-2")
        held = jobs.take_many(4, 0)
        assert [each.payload for each in broker.find("nightly")] == [b"0", b"1", b"2"]
        assert len(broker.spots("nightly")) == 3
        assert [each.payload for each in broker.cancel("nightly")] == [b"4", b"5", b"6", b"7"], "behind those held"
        assert len(held) == 4
        assert jobs.stats().ready == 1
        assert broker.cancel("nightly") == []
