"""The files beside the database: for all who may use it, and never another owner's file."""

import fcntl
import multiprocessing
import os
import shutil
import socket
import stat
import tempfile
import threading
from pathlib import Path

import pytest
from kit.conformance.store import TIMEOUT_S, arm, commit, read
from kit.processes import Program, in_child
from kit.sqlite_apart import open_apart

from kombu_fdb import doctor
from kombu_fdb.errors import StoreUnavailable
from kombu_fdb.settings.location import SqliteLocation
from kombu_fdb.store.sqlite.database import SqliteDatabase
from kombu_fdb.store.sqlite.files import Access

SECRET = b"ssh-ed25519 AAAA"
ALICE, BOB, MALLORY = 54321, 54322, 54666
TEAM = 54999

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")


@pytest.fixture
def folder():
    """Not pytest's own, which lets no other user in."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    folder = root / "folder"  # tests give it to users, who would be strangers in the system's folder
    folder.mkdir(0o755)
    yield folder
    shutil.rmtree(root)


@pytest.fixture
def victim(folder):
    victim = folder / "authorized_keys"
    victim.write_bytes(SECRET)
    victim.chmod(0o600)
    return victim


def refused(folder, name):
    """The error names the file in the way, and what to do."""
    path = folder / name
    with pytest.raises(StoreUnavailable, match=rf"in the way.*{path}\).*ls -ld {path}"):
        SqliteDatabase.open(str(folder / "b.db"), timeout_s=1)


def as_user(user, work, *, groups=(), group=None):
    def child():
        os.setgroups(list(groups))
        os.setresgid(*[user if group is None else group] * 3)
        os.setresuid(user, user, user)
        os.umask(0o022)
        work()

    in_child(child)


def use(path, *, key=b"a"):
    """All that a worker does with a store: write, wait, be woken."""
    database = SqliteDatabase.open(str(path))
    commit(database, lambda tr: tr.set(key, b"1"))
    _, fired = arm(database, b"bell")
    other = open_apart(os.path.realpath(path))
    commit(other, lambda tr: tr.set_versionstamped_value(b"bell"))
    assert fired.wait(TIMEOUT_S)
    other.close()
    database.close()


# Links, pipes and folders in the way


@pytest.mark.parametrize("name", ["b.db-gate", "b.db-lock", "b.db-bells", "b.db-bells/generation"])
@pytest.mark.parametrize("kind", ["link", "hard link", "fifo", "socket", "other kind"])
def test_nothing_else_is_followed_opened_or_written(folder, victim, name, kind):
    place = folder / name
    place.parent.mkdir(exist_ok=True)
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, place)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place))
    elif name == "b.db-bells":
        place.touch()
    else:
        place.mkdir()
    before = victim.stat()
    refused(folder, name)
    assert victim.read_bytes() == SECRET
    assert (victim.stat().st_mode, victim.stat().st_uid) == (before.st_mode, before.st_uid)


@pytest.mark.parametrize("kind", ["link", "hard link", "file", "link to a pipe"])
def test_a_bell_that_is_no_pipe_is_not_rung(folder, victim, kind):
    database = SqliteDatabase.open(str(folder / "b.db"))
    bell = folder / "b.db-bells" / "1-x.bell"
    if kind == "link":
        bell.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, bell)
    elif kind == "file":
        bell.touch()
    else:
        os.mkfifo(folder / "pipe")
        bell.symlink_to(folder / "pipe")
    with (folder / "b.db-bells" / "generation").open("ab") as generation:
        generation.write(b".")
    commit(database, lambda tr: tr.set_versionstamped_value(b"bell"))
    assert victim.read_bytes() == SECRET
    assert kind == "link to a pipe" or bell.stat().st_size in {0, len(SECRET)}
    database.close()


def test_another_folder_in_the_place_of_the_bells_gets_nothing(folder, victim):
    database = SqliteDatabase.open(str(folder / "b.db"))
    (folder / "b.db-bells").rename(folder / "old")
    (folder / "trap").mkdir()
    (folder / "trap" / "generation").symlink_to(victim)
    (folder / "b.db-bells").symlink_to(folder / "trap")
    _, fired = arm(database, b"bell")
    commit(database, lambda tr: tr.set_versionstamped_value(b"bell"))
    assert fired.wait(TIMEOUT_S)
    assert [each.name for each in (folder / "trap").iterdir()] == ["generation"]
    assert victim.read_bytes() == SECRET
    database.close()


# Strangers


@as_root
@pytest.mark.parametrize("name", ["b.db-gate", "b.db-lock", "b.db-bells", "b.db-wal", "b.db-shm", "b.db-journal"])
@pytest.mark.parametrize("mode", [0o600, 0o666], ids=oct)
@pytest.mark.parametrize("user", [ALICE, 0], ids=["user", "root"])
def test_a_strangers_file_in_a_folder_that_everybody_may_write_to(folder, name, mode, user):
    folder.chmod(0o1777)

    def squat():
        if name == "b.db-bells":
            (folder / name).mkdir(mode=0o777)
        else:
            (folder / name).touch()
            (folder / name).chmod(mode)

    def open_it():
        with pytest.raises(StoreUnavailable, match=rf"another user.*{folder}/{name}\).*folder of your own"):
            SqliteDatabase.open(str(folder / "b.db"), timeout_s=1)

    as_user(MALLORY, squat)
    as_user(user, open_it)


@as_root
@pytest.mark.parametrize("planted", ["file", "link", "link to a file of the victim's", "link to nothing"])
@pytest.mark.parametrize("user", [ALICE, 0], ids=["user", "root"])
def test_a_strangers_database_in_a_folder_that_everybody_may_write_to(folder, victim, planted, user):
    folder.chmod(0o1777)
    own = folder / "own"
    as_user(user, own.mkdir)
    as_user(user, (own / "empty").touch)

    def squat():
        if planted == "file":
            SqliteDatabase.open(str(folder / "b.db")).close()
            (folder / "b.db").chmod(0o666)
        else:
            target = {"link": victim, "link to nothing": own / "made"}.get(planted, own / "empty")
            (folder / "b.db").symlink_to(target)

    def open_it():
        with pytest.raises(StoreUnavailable, match="folder that every user can write to"):
            SqliteDatabase.open(str(folder / "b.db"), timeout_s=1)

    as_user(MALLORY, squat)
    as_user(user, open_it)
    assert [(each.name, each.stat().st_size) for each in own.iterdir()] == [("empty", 0)]


@as_root
@pytest.mark.parametrize("planted", ["folder", "link to a folder", "link behind the user's own link"])
def test_a_strangers_folder_on_the_way_to_the_database(folder, planted):
    folder.chmod(0o1777)
    path = folder / "shop" / "b.db"

    def squat():
        real = folder / ("shop" if planted == "folder" else "mallorys")
        real.mkdir()
        SqliteDatabase.open(str(real / "b.db")).close()
        (real / "b.db").chmod(0o666)
        real.chmod(0o755)
        if planted == "link to a folder":
            (folder / "shop").symlink_to("mallorys")

    def open_it():
        if planted == "link behind the user's own link":
            (folder / "shop").symlink_to(folder / "mallorys")
        with pytest.raises(StoreUnavailable, match=r"another user.*folder that every user can write to"):
            SqliteDatabase.open(str(path), timeout_s=1)

    as_user(MALLORY, squat)
    as_user(ALICE, open_it)


@as_root
def test_a_users_own_folder_and_link_where_everybody_may_write(folder):
    folder.chmod(0o1777)

    def use_it():
        (folder / "own").mkdir()
        (folder / "link").symlink_to("own/../own")
        use(folder / "link" / "b.db")

    as_user(ALICE, use_it)


@as_root
@pytest.mark.parametrize(("mode", "left"), [(0o644, "0o600"), (0o664, "0o660")])
def test_who_may_only_read_the_database_locks_nothing(folder, mode, left):
    """SQLite's own locks as well: a lock for reading of ``-shm`` would stop all writers."""

    def make():
        (folder / "b.db").touch()
        (folder / "b.db").chmod(mode)
        database = SqliteDatabase.open(str(folder / "b.db"))
        files = [each for each in folder.iterdir() if each.is_file()]
        assert {each.name for each in files} == {f"b.db{end}" for end in ("", "-gate", "-lock", "-shm", "-wal")}
        assert {oct(stat.S_IMODE(each.stat().st_mode)) for each in files} == {left}
        database.close()

    folder.chmod(0o777)
    as_user(ALICE, make)


def test_a_mode_that_changes_cancels_no_lock(folder):
    """To close a file that was opened would; the database is open in this process."""
    path = folder / "b.db"
    path.touch(0o600)
    with path.open("r+b") as database:
        fcntl.lockf(database, fcntl.LOCK_EX)
        path.chmod(0o640)
        Access.of(str(path)).share_database(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

        def lock():
            with path.open("r+b") as other, pytest.raises(BlockingIOError):
                fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

        in_child(lock)


@pytest.mark.parametrize("name", ["b.db", "b.db-wal"])
def test_a_link_that_comes_between_two_looks_is_not_followed(folder, victim, name, monkeypatch):
    path = folder / "b.db"
    for each in (path, folder / name):
        each.touch()
        each.chmod(0o664)
    access, check = Access.of(str(path)), Access.check

    def swap(self, status, kind, at):
        check(self, status, kind, at)
        if at == str(folder / name) and not (folder / name).is_symlink():
            (folder / name).unlink()
            (folder / name).symlink_to(victim)

    monkeypatch.setattr(Access, "check", swap)
    with pytest.raises((StoreUnavailable, OSError)):
        access.share_database(str(path))
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


@as_root
def test_a_strangers_link_is_not_followed_by_root(folder, victim):
    folder.chmod(0o1777)
    as_user(MALLORY, lambda: (folder / "b.db-lock").symlink_to(victim))
    refused(folder, "b.db-lock")
    assert victim.stat().st_uid == 0
    assert victim.read_bytes() == SECRET


def test_files_that_let_everybody_in_are_closed(folder):
    for name in ("b.db-gate", "b.db-lock"):
        (folder / name).touch()
        (folder / name).chmod(0o666)
    (folder / "b.db-bells").mkdir()
    (folder / "b.db-bells").chmod(0o777)
    SqliteDatabase.open(str(folder / "b.db")).close()
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.glob("b.db*")}
    assert modes == {"b.db": 0o600, "b.db-gate": 0o600, "b.db-lock": 0o600, "b.db-bells": 0o700}


# Sharing with a group


def open_to_team(path):
    os.chown(path, -1, TEAM)
    path.chmod(0o660)


@as_root
@pytest.mark.parametrize("setgid", [True, False], ids=["setgid folder", "plain folder"])
@pytest.mark.parametrize("supplementary", [True, False], ids=["supplementary group", "primary group"])
def test_sharing_with_a_group(folder, setgid, supplementary):
    """As SECURITY.md says: open the file to the group; what lies beside follows."""
    shared, path = folder / "shared", folder / "shared" / "b.db"
    shared.mkdir()
    os.chown(shared, ALICE, TEAM)
    shared.chmod(0o2770 if setgid else 0o770)
    who = {"groups": (TEAM,)} if supplementary else {"group": TEAM}

    def first():
        use(path)
        open_to_team(path)
        use(path)  # what lies beside was made for alice alone

    as_user(ALICE, first, **who)
    for user in (BOB, ALICE, BOB):
        as_user(user, lambda: use(path), **who)
    bells = path.with_name("b.db-bells").stat()
    assert stat.S_IMODE(bells.st_mode) == 0o2770
    assert {path.with_name(f"b.db-{name}").stat().st_gid for name in ("gate", "lock", "bells")} == {TEAM}


@as_root
@pytest.mark.parametrize("supplementary", [True, False])
def test_two_users_of_a_group_at_the_same_time(folder, supplementary):
    """Bob comes first, so SQLite's log is his; alice owns the database."""
    path = folder / "b.db"

    def too_early():
        with pytest.raises(StoreUnavailable, match=rf"open to a group.*{path}-(bells|gate).*once as its owner"):
            SqliteDatabase.open(str(path))

    os.chown(folder, ALICE, TEAM)
    folder.chmod(0o770)
    who = {"groups": (TEAM,)} if supplementary else {"group": TEAM}
    as_user(ALICE, lambda: (SqliteDatabase.open(str(path)).close(), open_to_team(path)), **who)
    as_user(BOB, too_early, **who)
    as_user(ALICE, lambda: SqliteDatabase.open(str(path)).close(), **who)

    def bob():
        database = SqliteDatabase.open(str(path))
        _, fired = arm(database, b"bell")
        opened.set()
        assert fired.wait(TIMEOUT_S)
        database.close()

    def alice():
        assert opened.wait(TIMEOUT_S)
        database = SqliteDatabase.open(str(path))
        commit(database, lambda tr: tr.set_versionstamped_value(b"bell"))
        assert read(database, b"bell")
        database.close()

    opened = multiprocessing.get_context("fork").Event()
    failures = []

    def run(user, work):
        try:
            as_user(user, work, **who)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=each) for each in ((BOB, bob), (ALICE, alice))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not failures


HOLDER = """
    import sys
    from kombu_fdb.store.sqlite.database import SqliteDatabase
    database = SqliteDatabase.open(sys.argv[1])
    print("open")
    sys.stdin.readline()
"""


@as_root
@pytest.mark.parametrize("name", ["b.db", "b.db-gate", "b.db-lock", "b.db-bells", "b.db-wal", "b.db-shm"])
def test_the_error_names_the_file_that_is_in_the_way(folder, name):
    """Left at 0600 by root, or by an older version: never blame the database for it."""
    path = folder / "b.db"
    os.chown(folder, BOB, BOB)

    def bob():
        with pytest.raises(StoreUnavailable, match=rf"path: {folder}/{name}.*another user") as caught:
            SqliteDatabase.open(str(path), timeout_s=1)
        assert f"path: {path})" not in str(caught.value) or name == "b.db"

    with Program(HOLDER, str(path)) as holder:
        assert holder.hear() == "open"
        for each in folder.rglob("*"):
            os.chown(each, BOB, BOB)
        os.chown(folder / name, 0, 0)
        (folder / name).chmod(0o700 if name == "b.db-bells" else 0o600)
        as_user(BOB, bob)


@as_root
def test_what_root_makes_belongs_to_the_owner_of_the_database(folder):
    path = folder / "b.db"
    os.chown(folder, ALICE, ALICE)
    as_user(ALICE, lambda: SqliteDatabase.open(str(path)).close())
    for name in ("gate", "lock"):
        path.with_name(f"b.db-{name}").unlink()
    shutil.rmtree(path.with_name("b.db-bells"))
    use(path)  # as root, the first
    as_user(ALICE, lambda: use(path))


@as_root
def test_what_root_made_by_mistake_is_handed_over_as_the_error_says(folder):
    path = folder / "b.db"
    os.chown(folder, ALICE, ALICE)
    use(path)

    def alice():
        with pytest.raises(StoreUnavailable, match=rf"`chown USER {path}`.* Then root .* opens the store once"):
            use(path)
        (told,) = [each.fix for each in doctor.check_file(SqliteLocation(path, "n")) if each.level == "fail"]
        assert f"`chown USER {path}`" in told

    as_user(ALICE, alice)
    os.chown(path, ALICE, -1)
    assert doctor.main([f"fdb+sqlite:///{path}"], [].append) == 0
    as_user(ALICE, lambda: use(path))
