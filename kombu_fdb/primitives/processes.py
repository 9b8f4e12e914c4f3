"""The processes of this host: which one has a number, and how long it has computed.

Model. A number alone names no process: it is given again, other machines and containers have it too, and a program that
takes another one's place (``exec``) keeps it. So a process is told by its *fingerprint*: a digest of the boot, the
namespace of the numbers, the number, when the process started, and where its program's stack begins. The same
fingerprint is the same program in the same process. From another container, as another user, or on a system without
``/proc``, a process can't be seen.

Its time is what the kernel charged to all its threads. It stands still in a process that is stopped or frozen, waits or
hangs; in one that computes it goes on, whether or not any of its Python code can run.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

__all__ = ["Seen", "see"]

#: In ``/proc/<pid>/stat``, behind the program's name (https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html).
_USER, _SYSTEM, _START, _STACK = 11, 12, 19, 25
_DIGEST_BYTES = 16


class Seen(NamedTuple):
    """A process that runs. ``cpu_s``: how long it has computed so far, in seconds."""

    fingerprint: str
    cpu_s: float


def see(pid: int) -> Seen | None:
    """The process with this number, as far as this one can see it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        fields = Path(f"/proc/{pid:d}/stat").read_bytes().rpartition(b")")[2].decode().split()
        start, stack = fields[_START], fields[_STACK]
        ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    except (OSError, LookupError, ValueError):
        return None
    if stack == "0":  # another user's, or a process that has ended
        return None
    told = " ".join([boot, namespace, str(pid), start, stack]).encode()
    return Seen(blake2b(told, digest_size=_DIGEST_BYTES).hexdigest(), ticks / os.sysconf("SC_CLK_TCK"))
