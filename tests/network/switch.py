"""The switch of a box: takes IP packets from the machines' TUN devices, and lets each go to its machine when it is due.

The model: a link is what lies between two machines in one direction. It has a delay, a jitter, a share of packets that
it loses, and a bandwidth. Packets of a link stay in order, and those that would wait for more than a second behind
others for the bandwidth are dropped, as a device with a full buffer does. A pair of machines without a link is next to
each other.

It is a process of its own, so that no lock of an interpreter delays a packet, and runs before everything else where it
may. Started by ``box.py`` with a socket, on which it hears of machines and links, and which ends it when it closes.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

#: What waits longer than that for the bandwidth of its link is dropped.
BUFFER_S = 1.0
LONGEST_MESSAGE = 1 << 17
LONGEST_PACKET = 65_536


@dataclass
class Link:
    """One direction. ``jitter_s`` is the most that is added to the delay; ``loss`` is between 0 and 1."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float | None = None


class _Line:
    """A link with what is under way on it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._free_at = self._last_at = 0.0

    def due(self, now: float, size: int, chance: random.Random) -> float | None:
        """When a packet that comes now arrives; None if it does not."""
        link = self.link
        if link.loss and chance.random() < link.loss:
            return None
        sent = now
        if link.bytes_per_s is not None:
            if self._free_at - now > BUFFER_S:
                return None
            sent = self._free_at = max(now, self._free_at) + size / link.bytes_per_s
        due = sent + link.delay_s + (chance.random() * link.jitter_s if link.jitter_s else 0.0)
        self._last_at = max(due, self._last_at)
        return self._last_at


class Switch:
    """See the module."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._chance = random.Random()
        self._devices: dict[bytes, int] = {}
        self._lines: dict[bytes, _Line] = {}
        #: When a packet is due, its number, its device.
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._poll = select.epoll()
        self._poll.register(control, select.EPOLLIN)

    def run(self) -> None:
        """Until the other end of the socket closes."""
        while True:
            # An epoll of its own waits in whole milliseconds.
            select.select([self._poll], [], [], self._patience())
            for device, _ in self._poll.poll(0):
                if device != self._control.fileno():
                    self._take(device)
                elif not self._hear():
                    return
            self._release()

    def _patience(self) -> float | None:
        return max(self._under_way[0][0] - time.monotonic(), 0.0) if self._under_way else None

    def _take(self, device: int) -> None:
        for _ in range(64):  # then it is the others' turn
            try:
                packet = os.read(device, LONGEST_PACKET)
            except BlockingIOError:
                return
            except OSError:  # its machine is gone
                self._poll.unregister(device)
                return
            target = self._devices.get(packet[16:20])
            if target is None or packet[0] >> 4 != 4:  # to an address without a device, or not IPv4
                continue
            line = self._lines.get(packet[12:20])
            if line is None:
                _send(target, packet)
            elif (due := line.due(time.monotonic(), len(packet), self._chance)) is not None:
                self._count += 1
                heapq.heappush(self._under_way, (due, self._count, target, packet))

    def _release(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(self._under_way)
            _send(target, packet)

    def _hear(self) -> bool:
        message, devices, _, _ = socket.recv_fds(self._control, LONGEST_MESSAGE, 1)
        if not message:
            return False
        told = json.loads(message)
        if "attach" in told:
            (device,) = devices
            os.set_blocking(device, False)
            self._devices[socket.inet_aton(told["attach"])] = device
            self._poll.register(device, select.EPOLLIN)
        for source, target, link in told.get("links", ()):
            between = socket.inet_aton(source) + socket.inet_aton(target)
            if link is None:
                self._lines.pop(between, None)
            else:
                self._lines[between] = _Line(Link(**link))
        self._control.send(b"done")
        return True


def _send(device: int, packet: bytes) -> None:
    with suppress(OSError):  # its machine is gone, or takes no more: a packet is lost
        os.write(device, packet)


def main() -> None:
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    Switch(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
