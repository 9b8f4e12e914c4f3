"""The native thread that beats while no greenlet can. Needs gevent itself."""

import importlib.util

import pytest
from kit.processes import Program, until

from kombu_fdb.api.broker import Broker

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed"),
]

#: More than were under way when the greenlets stopped.
BEATS = 4
#: Lets no greenlet run until it is told to go on: it waits for that, or computes.
PROGRAM = """
from gevent import monkey; monkey.patch_all()
import gevent, sys
from kombu_fdb.api.broker import Broker
select = monkey.get_original("select", "select")
with Broker.open(sys.argv[1], session_ttl=1.5) as broker:
    session = broker._client.session()
    print(session.session_id.hex())
    while sys.argv[2] == "compute" and not select([sys.stdin], [], [], 0)[0]:
        pass
    sys.stdin.readline()
    broker.queue("q").put(b"after")
    print("lost" if session.lost else "kept")
    sys.stdin.readline()
print("closed")
"""


def beat_of(broker, session):
    return {each.hex(): beat for each, beat, _ in broker._client.engine.sessions.beats()}[session]


@pytest.mark.parametrize("how", ["compute", "wait"])
def test_a_process_whose_greenlets_do_not_run_beats(url, how):
    with Broker.open(url) as broker, Program(PROGRAM, url, how) as program:
        session = program.hear()
        seen = set()

        def beats():
            seen.add(beat_of(broker, session))
            return len(seen)

        until(lambda: beats() > BEATS)
        program.tell()
        assert program.hear() == "kept"
        program.tell()
        assert program.hear() == "closed"
        assert program.end() == 0
