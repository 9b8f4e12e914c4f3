"""The processes of this host: which process has a pid, and how long it has been busy.

Model. A pid alone identifies no process: it is reused, other machines and containers have it too, and a program that
replaces another one (``exec``) keeps it. So a process is identified by its *fingerprint*: a digest of the boot, the
pid's namespace, the pid, the start of the process, and the start of its program's stack. The same fingerprint means the
same program in the same process. A process can't be seen from another container, by another user, or on a system
without ``/proc``.

A process is *busy* while one of its threads computes, or waits for a core to compute on: so competition for the cores
does not matter. A process that is stopped or frozen, waits or hangs is not busy; one that computes is, even if none of
its Python code can run. (A kernel that does not report how long threads wait for a core still reports how long they
have had one.)
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

#: In ``/proc/<pid>/stat``, after the program's name (https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html).
_USER, _SYSTEM, _START, _STACK = 11, 12, 19, 25
#: Fields of a thread's ``schedstat``, in nanoseconds: running on a core, waiting for one.
_BUSY = slice(0, 2)
_DIGEST_BYTES = 16


def see(pid: int) -> tuple[str, float]:
    """The fingerprint of the process with this pid, and how many seconds its threads have been busy in total.

    "" and 0 for a process that this one can't see.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
        fields = Path(f"/proc/{pid:d}/stat").read_bytes().rpartition(b")")[2].decode().split()
        start, stack = fields[_START], fields[_STACK]
        computed_s = (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")
        busy_s = sum(map(_busy_s, Path(f"/proc/{pid:d}/task").iterdir()))
    except (OSError, LookupError, ValueError):
        return "", 0.0
    if stack == "0":  # another user's process, or an ended one
        return "", 0.0
    told = " ".join([boot, namespace, str(pid), start, stack]).encode()
    return blake2b(told, digest_size=_DIGEST_BYTES).hexdigest(), max(computed_s, busy_s)


def _busy_s(thread: Path) -> float:
    """How long the thread has been busy; 0 if it has ended, or if the kernel does not report it."""
    try:
        return sum(map(int, (thread / "schedstat").read_text().split()[_BUSY])) / 1e9
    except (OSError, ValueError):
        return 0.0
