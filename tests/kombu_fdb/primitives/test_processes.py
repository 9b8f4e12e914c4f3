"""What can be seen of a process from outside. Needs ``/proc``."""

import os
import signal
import sys
from pathlib import Path

import pytest
from kit.processes import Program, until

from kombu_fdb.primitives.processes import see

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc"),
]

#: Computes without end when it is told to.
PROGRAM = """
import os, sys
from kombu_fdb.primitives.processes import see
print(see(os.getpid())[0])
if sys.stdin.readline() == "exec\\n":
    os.execv(sys.executable, [sys.executable, "-c", "print('another'); input()"])
while True:
    pass
"""


def busy_s(pid):
    fingerprint, busy = see(pid)
    assert fingerprint
    return busy


def test_a_process_is_seen_as_it_sees_itself():
    with Program(PROGRAM) as program:
        own = program.hear()
        assert see(program.process.pid)[0] == own
        assert see(os.getpid())[0] not in ("", own)


def test_its_time_goes_on_while_it_computes_and_only_then():
    with Program(PROGRAM) as program:
        program.hear()
        pid = program.process.pid
        before = busy_s(pid)
        program.tell("compute")
        until(lambda: busy_s(pid) > before + 0.1)
        program.process.send_signal(signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        stopped = busy_s(pid)
        mine = busy_s(os.getpid())
        until(lambda: busy_s(os.getpid()) > mine + 0.1)
        assert busy_s(pid) == stopped


def test_to_wait_for_a_core_is_to_be_busy():
    """So that it does not matter how many others want it."""
    one_core = {min(os.sched_getaffinity(0))}
    with Program(PROGRAM) as program, Program(PROGRAM) as other:
        for each in (program, other):
            each.hear()
            os.sched_setaffinity(each.process.pid, one_core)
            each.tell("compute")

        def computed_s():
            fields = Path(f"/proc/{program.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        until(lambda: busy_s(program.process.pid) > computed_s() + 0.5)


def test_one_that_has_ended_is_not_seen_be_it_waited_for_or_not():
    with Program(PROGRAM) as program:
        program.hear()
        pid = program.process.pid
        program.process.kill()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert see(pid) == ("", 0.0)
    assert see(pid) == ("", 0.0)


def test_a_program_that_takes_another_ones_place_is_not_taken_for_it():
    with Program(PROGRAM) as program:
        own = program.hear()
        program.tell("exec")
        assert program.hear() == "another"
        assert see(program.process.pid)[0] not in ("", own)


@pytest.mark.parametrize("pid", [0, -1, 2**40, 10**30])
def test_what_is_no_process_is_not_seen(pid):
    assert see(pid) == ("", 0.0)
