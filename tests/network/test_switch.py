from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("the switch takes Linux", allow_module_level=True)

from .switch import Link, Switch, _Line

ONE, OTHER, UNUSED = "10.77.0.1", "10.77.0.2", "10.77.0.9"
DEADLINE_S = 60


def line(**link: float) -> tuple[_Line, random.Random]:
    return _Line(Link(**link)), random.Random(1)


def test_a_packet_arrives_after_its_delay() -> None:
    lane, chance = line(delay_s=0.5)
    assert lane.due(10.0, 1000, chance) == 10.5
    assert lane.due(10.1, 1000, chance) == 10.6


def test_jitter_is_added_and_overtakes_nothing() -> None:
    lane, chance = line(delay_s=1.0, jitter_s=1.0)
    dues = [lane.due(number / 100, 1000, chance) or 0 for number in range(100)]
    assert dues == sorted(dues)
    assert all(1.0 <= due - number / 100 <= 2.0 for number, due in enumerate(dues))
    assert len({due - number / 100 for number, due in enumerate(dues)}) > 1


def test_a_bandwidth_lets_packets_go_one_after_another() -> None:
    lane, chance = line(delay_s=1.0, bytes_per_s=1000.0)
    assert [lane.due(0.0, 500, chance) for _ in range(3)] == [1.5, 2.0, 2.5]
    assert lane.due(10.0, 500, chance) == 11.5


def test_what_waits_for_too_long_is_dropped() -> None:
    lane, chance = line(bytes_per_s=1000.0)
    dues = [lane.due(0.0, 600, chance) for _ in range(4)]
    assert dues == [0.6, 1.2, None, None]


def test_loss_is_a_share() -> None:
    lane, chance = line(loss=0.25)
    lost = sum(lane.due(0.0, 1000, chance) is None for _ in range(4000))
    assert 800 < lost < 1200


# -- the switch itself, with sockets for devices -----------------------------------------------------------------------


class Wires:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self.ends: dict[str, socket.socket] = {}

    def attach(self, address: str) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        here.settimeout(DEADLINE_S)
        self.ends[address] = here
        self.tell({"attach": address}, there)
        there.close()

    def tell(self, message: dict[str, object], *devices: socket.socket) -> None:
        socket.send_fds(self._control, [json.dumps(message).encode()], [each.fileno() for each in devices])
        assert self._control.recv(16) == b"done"

    def link(self, source: str, target: str, **link: float) -> None:
        self.tell({"links": [[source, target, link]]})

    def send(self, source: str, target: str, content: bytes, version: int = 4) -> None:
        header = bytes([version << 4 | 5]) + bytes(11) + socket.inet_aton(source) + socket.inet_aton(target)
        self.ends[source].send(header + content)

    def received(self, target: str) -> bytes:
        return self.ends[target].recv(1 << 16)[20:]


@pytest.fixture
def wires() -> Iterator[Wires]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=Switch(there).run)
    thread.start()
    wires = Wires(here)
    wires.attach(ONE)
    wires.attach(OTHER)
    yield wires
    here.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    for each in (there, *wires.ends.values()):
        each.close()


def test_a_packet_goes_to_its_address_only(wires: Wires) -> None:
    wires.send(ONE, UNUSED, b"to no device")
    wires.send(ONE, OTHER, b"version 6", version=6)
    wires.send(ONE, ONE, b"to itself")
    wires.send(ONE, OTHER, b"to the other")
    assert wires.received(OTHER) == b"to the other"
    assert wires.received(ONE) == b"to itself"


def test_a_link_is_one_direction_of_one_pair(wires: Wires) -> None:
    wires.link(ONE, OTHER, loss=1.0)
    wires.send(ONE, OTHER, b"lost")
    wires.send(OTHER, ONE, b"there")
    assert wires.received(ONE) == b"there"
    wires.send(ONE, ONE, b"behind it")  # what one end sends is taken in its order
    assert wires.received(ONE) == b"behind it"
    wires.tell({"links": [[ONE, OTHER, None]]})
    wires.send(ONE, OTHER, b"found")
    assert wires.received(OTHER) == b"found"


def test_a_delayed_packet_lets_others_pass(wires: Wires) -> None:
    third = "10.77.0.3"
    wires.attach(third)
    wires.link(ONE, OTHER, delay_s=3600.0)
    wires.send(ONE, OTHER, b"far")
    wires.send(ONE, ONE, b"behind it")
    assert wires.received(ONE) == b"behind it"
    wires.send(third, OTHER, b"near")
    assert wires.received(OTHER) == b"near"


def test_a_delayed_packet_arrives_when_it_is_due(wires: Wires) -> None:
    wires.link(ONE, OTHER, delay_s=0.05)
    begun = time.monotonic()
    wires.send(ONE, OTHER, b"first")
    wires.send(ONE, OTHER, b"second")
    assert wires.received(OTHER) == b"first"
    assert time.monotonic() - begun >= 0.05
    assert wires.received(OTHER) == b"second"


def test_a_machine_that_is_gone_takes_no_other_along(wires: Wires) -> None:
    third = "10.77.0.3"
    wires.attach(third)
    wires.ends[third].close()
    wires.send(ONE, third, b"to one that is gone")
    wires.send(ONE, OTHER, b"to the other")
    assert wires.received(OTHER) == b"to the other"
