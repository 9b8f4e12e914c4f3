"""A RabbitMQ of our own ends with the process that has started it, however that ends."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit.rabbitmq import Node, rabbitmq_unavailable_reason

pytestmark = [
    pytest.mark.process,
    pytest.mark.xdist_group("rabbitmq"),
    pytest.mark.skipif(rabbitmq_unavailable_reason() is not None, reason=str(rabbitmq_unavailable_reason())),
]

END_S = 60
PROGRAM = """
import signal
from kit.rabbitmq import Node

class Told(Node):
    def _await(self, log):
        {awaited}
        print(self.guard.pid, self.port, self.directory, flush=True)
        signal.pause()

with Told():
    pass
"""


@pytest.fixture(params=["super()._await(log)", ""], ids=["that runs", "that starts"])
def told(request):
    """Of a node whose program is killed: its guard, its port and its folder."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(awaited=request.param or "pass")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        found = program.stdout.readline().split()
        guard = os.pidfd_open(int(found[0]))
        program.send_signal(signal.SIGKILL)
    assert select.select([guard], [], [], END_S)[0], "its guard goes on"
    os.close(guard)
    return found


def test_a_node_dies_with_its_program(told):
    _guard, port, directory = told
    assert not Path(directory).exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))


def test_a_node_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setenv("RABBITMQ_SERVER_START_ARGS", "+P many")  # the virtual machine wants a number
    node = Node()
    with pytest.raises(RuntimeError, match="the emulator"), node:
        pass
    assert not node.directory.exists()
