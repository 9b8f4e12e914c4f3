"""Place, rank, stamp and session id are all bytes, and mypy tells them apart: from each other, and from a row's key."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SWAPPED = "# swapped"
CALLS = f"""
from kombu_fdb.engine.facade.engine import Sessions
from kombu_fdb.engine.messages.message import delete, put_in_place, put_leased, put_ready
from kombu_fdb.engine.scheduling.fair import Turn
from kombu_fdb.engine.work import Work
from kombu_fdb.keyspace.codec import Message, encode_lease
from kombu_fdb.keyspace.layout import Keyspace, split_place
from kombu_fdb.model import Lease, Place, Rank, SessionId, Stamp

def calls(keys: Keyspace, work: Work, sessions: Sessions, turn: Turn, key: bytes, value: bytes) -> None:
    place, session = keys.place("q", key), sessions.open({{}})
    name, rank = split_place(place)
    keys.at("q", place)
    keys.at("q", key)  {SWAPPED}
    keys.at("q", rank)  {SWAPPED}
    split_place(key)  {SWAPPED}
    encode_lease(Message("q", place, value))
    encode_lease(Message("q", key, value))  {SWAPPED}
    keys.items("q", name, rank)
    keys.items("q", name, place)  {SWAPPED}
    keys.ring_entry("q", turn.rank, turn.round, turn.stamp, turn.key)
    keys.ring_entry("q", turn.stamp, turn.round, turn.rank, turn.key)  {SWAPPED}
    Turn(rank, 1, turn.stamp, name, turn.rank)
    Turn(rank, 1, rank, name, turn.rank)  {SWAPPED}
    put_ready(work, "q", name, rank, value)
    put_ready(work, "q", name, place, value)  {SWAPPED}
    Lease(session, 1)
    Lease(place, 1)  {SWAPPED}
    keys.consumer("q", session, "tag")
    keys.consumer("q", rank, "tag")  {SWAPPED}
    sessions.fence(session, value)
    sessions.fence(value, session)  {SWAPPED}
    put_in_place(work, Message.of_lease(value))
    put_in_place(work, Message("q", key, value))  {SWAPPED}
    put_leased(work, Lease(session, 1), Message("q", place, value))
    put_leased(work, Lease(session, 1), Message("q", key, value))  {SWAPPED}
    delete(work, Message("q", key, value))
"""


def test_mypy_sees_a_swap(monkeypatch, tmp_path):
    mypy = pytest.importorskip("mypy.api", reason="mypy is not installed")
    monkeypatch.chdir(ROOT)
    told, failed, _status = mypy.run(
        ["--config-file", "", "--cache-dir", str(tmp_path), "--strict", "--follow-imports", "silent", "-c", CALLS]
    )
    assert failed == ""
    seen = {int(line) for line in re.findall(r"^<string>:(\d+): error: .*\[arg-type\]$", told, re.MULTILINE)}
    assert seen == {number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith(SWAPPED)}, told
