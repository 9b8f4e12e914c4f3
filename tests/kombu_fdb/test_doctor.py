import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from kit.costs import CountingDatabase, cost
from kit.faults import Fault, Faults, FaultyDatabase

from kombu_fdb import Broker, doctor
from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.upkeep.quarantine import Aside
from kombu_fdb.engine.work import Environment
from kombu_fdb.model import Publication
from kombu_fdb.primitives.clock import random_id
from kombu_fdb.process.duty_cycle import LIVING
from kombu_fdb.routing.tables import QueueDeclaration
from kombu_fdb.settings.options import parse_options
from kombu_fdb.testing.clock import ManualClock


def run(*arguments):
    lines = []
    code = doctor.main(arguments, lines.append)
    return code, "\n".join(lines)


def finding(findings, what):
    (found,) = [each for each in findings if each.what == what]
    return found


def test_a_healthy_file(tmp_path):
    code, text = run(f"fdb+sqlite:///{tmp_path}/broker.db")
    assert code == 0
    assert "ok    store           answers after" in text
    assert "ok    content         0 queues" in text


def test_a_damaged_file_is_not_well_though_it_can_be_read(tmp_path):
    path = tmp_path / "broker.db"
    with Broker.open(f"fdb+sqlite:///{path}") as broker:
        broker.queue("jobs").put_many(b"%d" % number for number in range(100))
    assert finding(doctor.examine(f"fdb+sqlite:///{path}", {}, {}), "damage") == ("ok", "damage", "none", "")
    with path.open("r+b") as file:
        file.seek(36)  # how many pages are free: https://www.sqlite.org/fileformat2.html#the_database_header
        file.write(bytes([0, 0, 0, 9]))
    code, text = run(f"fdb+sqlite:///{path}")
    assert code == 1
    assert re.search(
        r"fail  damage .*freelist.*\n.*restore a backup.*\nok    content .* 100 messages ready", text, re.IGNORECASE
    )


def test_the_look_for_damage_neither_lasts_nor_maps_the_file(tmp_path, monkeypatch):
    """Before 3.41, SQLite walked 17 s through a file of 1.4 GB that had to come from the disk, whatever it was told.

    What maps a file is ended by SIGBUS where the disk fails.
    """
    mapped, goes_on = [], threading.Event()

    class Connection(sqlite3.Connection):
        """As on a system that maps files, with a slow disk."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            super().execute("PRAGMA mmap_size=1000000")

        def execute(self, sql):
            if "integrity_check" in sql:
                mapped.extend(super().execute("PRAGMA mmap_size").fetchone())
                goes_on.wait(30)
            return super().execute(sql)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
    monkeypatch.setattr(doctor, "LOOK_S", 0.5)
    found = finding(doctor.examine(f"fdb+sqlite:///{tmp_path}/broker.db", {}, {}), "damage")
    goes_on.set()
    assert found == ("ok", "damage", "not looked for in all of the file: it takes more than 0.5 s", "")
    assert mapped in ([0], [])  # none, if the machine was so busy that the look had not begun


def test_the_look_for_damage_without_a_thread(tmp_path, monkeypatch):
    """Under a limit of threads or memory, the doctor ended with a traceback."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(doctor, "start", refuse)
    found = finding(doctor.examine(f"fdb+sqlite:///{tmp_path}/broker.db", {}, {}), "damage")
    assert found == ("ok", "damage", "none", "")


def test_the_content_is_that_of_the_pages(tmp_path):
    """Neither dead letters nor what Celery keeps for itself wait for a worker."""
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        broker.queue("jobs").put_many("abc")
        broker.queue("jobs").take(0).bury()
        broker.queue("w@h.celery.pidbox").put("x")
    _, text = run(f"fdb+sqlite:///{tmp_path}/broker.db")
    assert "1 queue: 2 messages ready, 0 delayed, 0 leased, 1 dead;" in text


def test_an_sqlite_that_is_too_old(tmp_path, monkeypatch):
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 34, 1))
    code, text = run(f"fdb+sqlite:///{tmp_path}/broker.db")
    assert code == 1
    assert "fail  sqlite" in text
    assert "-> Use a Python whose sqlite3.sqlite_version is at least 3.35.0" in text
    assert list(tmp_path.iterdir()) == []


def test_what_the_maintenance_set_aside(tmp_path):
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        broker._engine.upkeep.set_aside(Aside("promote", "jobs", "too large", 3, 1))
    code, text = run(f"fdb+sqlite:///{tmp_path}/broker.db")
    assert code == 0
    assert "warn  set aside       promote of 'jobs', 3 times: too large" in text
    assert "-> A worker's duty failed at this" in text


def test_what_it_found_stays_on_its_line(monkeypatch):
    """A name or an error that another program has chosen can't print a line of its own, or clear the screen."""
    found = doctor.Finding("fail", "store", "it says:\nall well\x1b[2J")
    monkeypatch.setattr("kombu_fdb.doctor.examine", lambda *_: iter([found]))
    _, text = run("fdb+sqlite://")
    assert "\x1b" not in text
    assert text.splitlines()[0].endswith("it says:\\nall well\\x1b[2J")


def test_messages_of_a_newer_version(tmp_path):
    with Broker.open(f"fdb+sqlite:///{tmp_path}/broker.db") as broker:
        broker.queue("jobs")
        broker._engine.transactions.write(lambda work: work.effects.change("jobs", "newer", 2))
    code, text = run(f"fdb+sqlite:///{tmp_path}/broker.db")
    assert code == 0
    assert "warn  newer messages  2 messages of a newer version, in 'jobs'" in text
    assert "-> Upgrade celery-fdb in the workers" in text


def test_the_default_file_is_not_made_by_looking(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    code, text = run()
    assert code == 0
    assert "it is not in use yet" in text
    assert list(tmp_path.iterdir()) == []


def test_a_default_file_that_can_not_be_made_is_named_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    code, text = run()
    assert code == 1
    assert f"can't be created: {tmp_path}/home is not a writable folder" in text
    assert "In the URL, name a file" in text


def test_a_folder_that_does_not_exist_is_named_with_the_command_that_makes_it(tmp_path):
    code, text = run(f"fdb+sqlite:///{tmp_path}/typo/broker.db")
    assert code == 1
    assert f"fail  file            no such folder: {tmp_path}/typo" in text
    assert f"-> mkdir -p {tmp_path}/typo" in text
    assert "store" not in [line.split()[1] for line in text.splitlines()]


def test_a_relative_path_is_named_with_the_four_slashes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = run("fdb+sqlite:///var/lib/shop/broker.db")
    assert code == 1
    assert f"no such folder: {tmp_path}/var/lib/shop" in text
    assert "-> An absolute path takes four slashes" in text
    code, text = run("fdb+sqlite:///broker.db")
    assert code == 0
    assert "warn  file            its path in the URL is relative" in text
    assert "0 failed, 1 to check" in text


def test_a_path_in_the_home_folder_is_the_same_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("fdb+sqlite:///~/broker.db")[1].endswith("all well")


def test_a_directory_instead_of_a_file(tmp_path):
    tmp_path.chmod(0o755)
    code, text = run(f"fdb+sqlite:///{tmp_path}")
    assert code == 1
    assert f"-> Name a file in it: {tmp_path}/broker.db." in text
    assert "chmod" not in text  # which would take the folder from all others


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_not_writable(tmp_path):
    tmp_path.chmod(0o500)
    code, text = run(f"fdb+sqlite:///{tmp_path}/broker.db")
    assert code == 1
    assert "is not writable" in text


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("circle.db", "fail  store           a file of the store can't be used"),
        (f"{300 * 'n'}.db", "fail  store           a file of the store can't be used"),
        ("letter.txt", "fail  store"),
    ],
)
def test_something_is_in_the_way_of_the_file(tmp_path, name, found):
    """As a folder that is closed to this user is."""
    (tmp_path / "circle.db").symlink_to(tmp_path / "circle.db")
    (tmp_path / "letter.txt").write_text("something else entirely" * 100)
    code, text = run(f"fdb+sqlite:///{tmp_path}/{name}")
    assert code == 1
    assert found in text


def test_wrong_options_end_the_examination_with_the_advice():
    code, text = run("fdb://", "--options", '{"sesion_ttl": 3}')
    assert code == 1
    assert "-> Did you mean session_ttl?" in text
    assert "fail  options         unknown option (name: sesion_ttl, suggestion: session_ttl)" in text


@pytest.mark.parametrize(
    ("name", "why"),
    [("visibility_timeout", "not needed"), ("priority_steps", "priority_order='redis'"), ("sep", "another")],
)
def test_an_option_that_another_broker_reads_is_warned_of(tmp_path, name, why):
    options = json.dumps({name: 7200, "session_ttl": 30})
    code, text = run(f"fdb+sqlite:///{tmp_path}/broker.db", "--options", options)
    assert code == 0
    assert "ok    options         session_ttl=30\n" in text
    [warning] = [line for line in text.splitlines() if line.startswith("warn  options ")]
    assert f"{name} does nothing here" in warning
    assert why in warning


@pytest.mark.parametrize("text", ["[]", "{", "3"])
def test_options_that_are_no_object_are_a_usage_error(text, capsys):
    with pytest.raises(SystemExit) as caught:
        run("fdb://", "--options", text)
    assert caught.value.code == 2
    assert "--options: not a JSON object" in capsys.readouterr().err


def test_a_clock_that_was_set_back(tmp_path):
    path = tmp_path / "broker.db"
    url = f"fdb+sqlite:///{path}"
    assert run(url)[0] == 0
    tomorrow = path.stat().st_mtime + 86_400
    os.utime(path, (tomorrow, tomorrow))
    code, text = run(url)
    assert code == 0
    assert "warn  clock           the store was written 86" in text


@pytest.mark.parametrize(
    ("content", "found", "connection_string"),
    [
        ("d:i@127.0.0.1:4500\n", "ok", "d:i@127.0.0.1:4500"),
        ("# made by hand\n\nd:i@10.0.0.1:4500,10.0.0.2:4500:tls\n", "ok", "d:i@10.0.0.1:4500,10.0.0.2:4500:tls"),
        ("", "fail", None),
        ("d@127.0.0.1:4500\n", "fail", None),
        ("d:i@127.0.0.1:4500\nd:i@127.0.0.2:4500\n", "fail", None),
        ("\udcff", "fail", None),
    ],
)
def test_cluster_files(tmp_path, content, found, connection_string):
    path = tmp_path / "fdb.cluster"
    path.write_text(content, errors="surrogateescape")
    assert (doctor.read_cluster_file(path)[0].level, doctor.read_cluster_file(path)[1]) == (found, connection_string)


def test_a_missing_cluster_file_is_one_line_with_the_next_step(tmp_path):
    missing, _ = doctor.read_cluster_file(tmp_path / "fdb.cluster")
    assert missing.found == f"{tmp_path}/fdb.cluster: No such file or directory"
    assert "Copy it from a server" in missing.fix


def test_a_cluster_without_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_load_library", lambda: Library(730))
    path = tmp_path / "fdb.cluster"
    path.write_text("d:i@127.0.0.1:1\n")
    code, text = run(f"fdb:///{path}")
    assert code == 1
    assert "fail  coordinators    0 of 1 reachable; not: 127.0.0.1:1" in text
    assert "-> Check that fdbserver runs" in text


class Library:
    def __init__(self, newest):
        self.newest = newest

    def fdb_get_max_api_version(self):
        return self.newest


def test_a_library_of_another_series_names_both_remedies(monkeypatch):
    monkeypatch.setattr(doctor, "_load_library", lambda: Library(730))
    monkeypatch.setattr(doctor, "_version", lambda _: "8.0.0")
    found = finding(doctor.check_library(), "client library")
    assert found.level == "fail"
    assert found.found == "7.3, older than the binding"
    assert "pip install 'foundationdb==7.3.*'" in found.fix
    assert "8.0 client" in found.fix


def test_a_newer_library_is_fine(monkeypatch):
    monkeypatch.setattr(doctor, "_load_library", lambda: Library(740))
    monkeypatch.setattr(doctor, "_version", lambda _: "7.3.79")
    assert finding(doctor.check_library(), "client library").level == "ok"


def test_a_missing_library_says_what_to_install(monkeypatch):
    def missing():
        raise OSError("libfdb_c.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "_load_library", missing)
    found = finding(doctor.check_library(), "client library")
    assert found.level == "fail"
    assert "foundationdb-clients" in found.fix


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/u/local\\040disk xfs rw 0 0
tmpfs /var tmpfs rw 0 0
overlay /var overlay rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/srv", "ext4"),
        ("/home/u", "nfs4"),
        ("/homework", "ext4"),
        ("/home/u/local disk/x", "xfs"),
        ("/var/lib", "overlay"),
    ],
)
def test_file_system_of_a_folder(folder, kind):
    assert doctor.file_system_of(Path(folder), MOUNTS) == kind


def test_network_file_systems_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "file_system_of", lambda *_: "nfs4")
    if not Path("/proc/self/mounts").exists():
        pytest.skip("no /proc here")
    code, text = run(f"fdb+sqlite:///{tmp_path}/broker.db")
    assert code == 1
    assert "fail  file system     nfs4" in text


@pytest.mark.parametrize("installed", ["5.4.2", "5", "4.9.9rc1"])
def test_a_kombu_that_is_too_old(monkeypatch, installed):
    monkeypatch.setattr(doctor, "_version", lambda _: installed)
    assert finding(doctor.check_software(), "kombu") == doctor.Finding(
        "fail", "kombu", installed, "pip install 'kombu>=5.5'"
    )


# -- the distance ------------------------------------------------------------------------------------------------------


def at_a_distance(trip_s, **options):
    """What is found with so much time for each round trip, and the store."""
    clock = ManualClock()
    store = FaultyDatabase(clock=clock)
    database = CountingDatabase(store, clock=clock, trip_s=trip_s)
    engine = Engine(database, "celery", Environment(clock, random_id, random.Random(0)))
    (found,) = doctor.check_distance(engine, parse_options(options), clock)
    return found, store


def test_the_distance_is_that_of_one_round_trip_and_nothing_is_left_in_the_store():
    found, store = at_a_distance(0.005)
    assert found == ("ok", "distance", "a round trip takes 5.0 ms, a commit 5.0 ms", "")
    assert store.version > 1
    assert store.items() == []


def test_timeouts_that_hold_what_must_fit_are_right():
    """At 100 ms the longest call takes 700 ms, and a beat 400 ms."""
    found, _ = at_a_distance(0.1, operation_timeout=2.81, session_ttl=2.41)
    assert found.level == "ok"


def test_a_timeout_that_is_too_short_for_the_distance_is_named_with_one_that_is_not():
    found, _ = at_a_distance(0.1, operation_timeout=2.79, session_ttl=2.41)
    assert found.level == "warn"
    assert "set operation_timeout to at least 3, or run" in found.fix
    found, _ = at_a_distance(0.1, operation_timeout=2.81, session_ttl=2.39)
    assert "set session_ttl to at least 3, or run" in found.fix
    found, _ = at_a_distance(0.4)
    assert "set operation_timeout to at least 12, or run" in found.fix
    found, _ = at_a_distance(0.4, session_ttl=2)
    assert "set operation_timeout to at least 12 and session_ttl to at least 10, or run" in found.fix


def test_a_call_and_a_beat_cost_what_the_rule_says():
    clock = ManualClock()
    database = CountingDatabase(FaultyDatabase(clock=clock))
    engine = Engine(database, "celery", Environment(clock, random_id, random.Random(0)))
    session = engine.sessions.open({}, ttl_s=30.0)
    assert cost(database, lambda: engine.sessions.beat(session, most=LIVING)).round_trips == doctor.BEAT_TRIPS + 1
    engine.queues.declare(QueueDeclaration("jobs"))
    newcomers = [Publication("", "jobs", b"x", key=key) for key in ("acme", "globex")]  # more than one claim wants
    engine.publisher.publish(newcomers)
    assert cost(database, lambda: engine.messages.claim(session, ["jobs"], 1)).round_trips == doctor.CALL_TRIPS + 1


def test_a_store_that_fails_meanwhile_is_no_reason_not_to_start():
    clock = ManualClock()
    store = FaultyDatabase(clock=clock, faults=(faults := Faults()))
    engine = Engine(store, "celery", Environment(clock, random_id, random.Random(0)))
    faults.at_reads(Fault.UNAVAILABLE)
    (found,) = doctor.check_distance(engine, parse_options({}), clock)
    assert found == ("warn", "distance", "not measured: a fault was injected", "Run the doctor again.")


def test_a_terminal_that_lacks_a_letter_is_told_its_code(tmp_path):
    """It was a ``UnicodeEncodeError``, from the command that errors name as the next step."""
    command = [sys.executable, "-m", "kombu_fdb.doctor", f"fdb+sqlite:///{tmp_path}/\xfc.db"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert said.stderr == ""
    assert "\\xfc.db" in said.stdout
    assert said.stdout.splitlines()[-1].endswith(("to check", "all well"))
