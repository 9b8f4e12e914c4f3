"""``python -m kombu_fdb.doctor [URL]``: check this machine's set-up, and name the next step for every problem.

Every check is a function that yields findings and never raises. The last ones open the store as a worker would; they
write what any first connection writes (the format version), and nothing else that stays.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import importlib.metadata
import json
import math
import os
import platform
import shutil
import socket
import sqlite3
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.messages.bury import DEAD_SUFFIX
from kombu_fdb.errors import KombuFDBError, OptionError, StoreUnavailable
from kombu_fdb.model import is_internal
from kombu_fdb.primitives.clock import Clock, random_id
from kombu_fdb.primitives.interruption import start
from kombu_fdb.primitives.masking import plain
from kombu_fdb.primitives.plural import plural
from kombu_fdb.process import connect
from kombu_fdb.process.session_threads import BEATS
from kombu_fdb.settings.location import (
    FOUR_SLASHES,
    SCHEMES,
    ClusterLocation,
    Location,
    SqliteLocation,
    default_cluster_file,
    is_connection_string,
    locate,
    parse_url,
)
from kombu_fdb.settings.options import Options, parse_options, why_ignored
from kombu_fdb.store.sqlite import files
from kombu_fdb.store.sqlite.errors import damage, explain, to_be_let_in

NEWER_STEP = "Upgrade celery-fdb in the workers: an old one could not read them, and a new one delivers them by itself."
ASIDE_STEP = (
    "A worker's duty failed at this and goes on with the rest; its log has the traceback. Look at the queue's "
    "oldest messages (celery fdb peek), or delete it."
)

Level = Literal["ok", "warn", "fail"]

#: File systems on which several hosts see the same file, or on which locks and shared memory can't be trusted.
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "glusterfs", "lustre", "ncpfs", "nfs"}
    | {"nfs4", "smb3", "smbfs", "vboxsf"}
)
LITTLE_SPACE_BYTES = 100 * 1024 * 1024
#: A file that is newer than "now" by more than this: the clock was set back.
CLOCK_SLACK_MS = 60_000
#: This program did not exist before (2026-01-01).
EPOCH_MS = 1_767_225_600_000
COORDINATOR_TIMEOUT_S = 2.0
#: For how long SQLite looks for damage: enough for a gigabyte.
LOOK_S = 10.0
SAMPLES = 9
#: Round trips of the longest call before its commit: a claim of a message with a key.
CALL_TRIPS = 6
#: How many times a call must be able to run within its deadline: it may lose to others three times.
CALL_RUNS = 4
#: Round trips of a heartbeat before its commit: the read version, what it reads, and in a small fleet the ring's rest.
BEAT_TRIPS = 3
OLDEST = {"kombu": (5, 5), "celery": (5, 5)}


class Finding(NamedTuple):
    """What was found, and the next step if it is not right."""

    level: Level
    what: str
    found: str
    fix: str = ""


Findings = Iterator[Finding]


# -- software ------------------------------------------------------------------------------------------------------


def check_software() -> Findings:
    """Versions of Python and of the packages."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("celery-fdb", "kombu", "celery"):
        version = _version(name)
        if version is None:
            step = "Install this package: pip install ." if name == "celery-fdb" else f"pip install {name}"
            yield Finding("warn" if name == "celery-fdb" else "fail", name, "not installed", step)
        elif _release(version) < OLDEST.get(name, ()):
            yield Finding("fail", name, version, f"pip install '{name}>={'.'.join(map(str, OLDEST[name]))}'")
        else:
            yield Finding("ok", name, version)


def check_schemes() -> Findings:
    """Whether kombu will know our URLs without an import in the user's code."""
    if not any(
        each.name == "kombu-fdb-autoload" for each in importlib.metadata.entry_points(group="kombu.serializers")
    ):
        yield Finding(
            "warn",
            "URL schemes",
            "the entry point that registers them is not installed",
            "Run pip install . (a checkout on PYTHONPATH is not enough), or import kombu_fdb.transport first.",
        )
        return
    import _kombu_fdb_autoload

    if _kombu_fdb_autoload.FAILURE is not None:
        step = "Reinstall kombu: pip install --force-reinstall kombu"
        yield Finding("fail", "URL schemes", repr(_kombu_fdb_autoload.FAILURE), step)
        return
    yield Finding("ok", "URL schemes", ", ".join(f"{scheme}://" for scheme in SCHEMES))


def check_clock(location: Location) -> Findings:
    """Wall clocks decide when delayed messages are due."""
    now_ms = Clock().wall_ms()
    step = "Set the clock and keep it right with NTP: it decides when delayed tasks are due."
    if now_ms < EPOCH_MS:
        yield Finding("fail", "clock", "it is set to a past year", step)
        return
    if isinstance(location, SqliteLocation):
        ahead_ms = 0
        with suppress(OSError):  # it is absent, or opening it reports what is in the way
            ahead_ms = location.path.stat().st_mtime_ns // 1_000_000 - now_ms
        if ahead_ms > CLOCK_SLACK_MS:
            found = f"the store was written {ahead_ms // 1000} s in the future"
            yield Finding("warn", "clock", found, step)
            return
    yield Finding("ok", "clock", "plausible")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


# -- SQLite --------------------------------------------------------------------------------------------------------


def check_file(location: SqliteLocation) -> Findings:
    """The library, the file's place and permissions."""
    try:
        files.check_sqlite_version()
        yield Finding("ok", "sqlite", sqlite3.sqlite_version)
    except StoreUnavailable as error:
        yield _failure("sqlite", error)
    with suppress(OSError):  # if it can't be looked at, opening it reports that
        yield from _place(location)


def _place(location: SqliteLocation) -> Findings:
    path, folder = location.path, location.path.parent
    if not folder.is_dir():
        if location.is_default:
            yield _makeable(path)
        else:
            step = FOUR_SLASHES if location.is_relative else f"mkdir -p {folder}"
            yield Finding("fail", "file", f"no such folder: {folder}", step)
        return
    if location.is_relative:
        found = "its path in the URL is relative, so a process that starts in another folder uses another file"
        yield Finding("warn", "file", found, FOUR_SLASHES)
    yield _writable(path, folder)
    if path.is_file() and path.stat().st_mode & 0o007:
        step = f"Run chmod o= {path}: now every user of this host can read and change the tasks in it."
        yield Finding("warn", "file mode", f"{path} is open to every user", step)
    yield from _file_system(folder)
    free = shutil.disk_usage(folder).free
    if free < LITTLE_SPACE_BYTES:
        yield Finding("warn", "disk", f"{free // 2**20} MiB free", f"Free space on the disk of {folder}.")


def _makeable(path: Path) -> Finding:
    """The default file, in a folder that the first user makes."""
    nearest = next(each for each in path.parents if each.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return Finding("ok", "file", f"{path} (will be created)")
    step = "In the URL, name a file in a folder that belongs to the workers' user: fdb+sqlite:////path/broker.db."
    return Finding("fail", "file", f"{path} can't be created: {nearest} is not a writable folder", step)


def _writable(path: Path, folder: Path) -> Finding:
    if path.is_dir():
        return Finding("fail", "file", f"{path} is a directory", f"Name a file in it: {path / 'broker.db'}.")
    if not os.access(folder, os.W_OK | os.X_OK):
        step = f"SQLite creates files next to its own: give the workers' user write access to {folder}."
        return Finding("fail", "file", f"the folder {folder} is not writable", step)
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        step = to_be_let_in(str(path)) or f"chmod u+rw {path}"
        return Finding("fail", "file", f"{path} is not readable and writable", step)
    return Finding("ok", "file", str(path) if path.exists() else f"{path} (will be created)")


def _file_system(folder: Path) -> Findings:
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return
    kind = file_system_of(folder.resolve(), mounts.read_text())
    if kind in NETWORK_FILE_SYSTEMS:
        step = "Move the file to a local disk, or use fdb:// for several hosts: SQLite's locks fail on this one."
        yield Finding("fail", "file system", kind, step)
    elif kind:
        yield Finding("ok", "file system", kind)


def file_system_of(folder: Path, mounts: str) -> str:
    """The type of the innermost mount that holds ``folder``; later lines hide earlier ones."""
    found, depth = "", -1
    for line in mounts.splitlines():
        fields = line.split()
        point = Path(fields[1].replace("\\040", " "))
        if folder.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = fields[2], len(point.parts)
    return found


# -- FoundationDB --------------------------------------------------------------------------------------------------


def check_library() -> Findings:
    """The binding, the client library, and whether they are of one series."""
    binding = _version("foundationdb")
    if binding is None:
        yield Finding("fail", "binding", "not installed", "pip install 'foundationdb==7.3.*'")
        return
    yield Finding("ok", "binding", binding)
    series = _release(binding)[:2]
    wanted = ".".join(map(str, series))
    install = (
        f"Install foundationdb-clients {wanted}.x from FoundationDB's release page, or put its folder on "
        f"{'DYLD_LIBRARY_PATH' if sys.platform == 'darwin' else 'LD_LIBRARY_PATH'}."
    )
    try:
        # The only safe call before an API version is selected; the selection is final, and the driver's.
        newest = int(_load_library().fdb_get_max_api_version())
    except (OSError, AttributeError) as error:
        yield Finding("fail", "client library", str(error), install)
        return
    has = f"{newest // 100}.{newest % 100 // 10}"
    if newest < series[0] * 100 + series[1] * 10:
        step = (
            f"pip install 'foundationdb=={has}.*'. Install the {wanted} client only if the cluster is of {wanted}: "
            "clients of other series don't reach it."
        )
        yield Finding("fail", "client library", f"{has}, older than the binding", step)
        return
    yield Finding("ok", "client library", has)


def _load_library() -> Any:
    name = "libfdb_c.dylib" if sys.platform == "darwin" else "libfdb_c.so"
    try:
        return ctypes.CDLL(name)
    except OSError:
        found = ctypes.util.find_library("fdb_c")
        if found is None:
            raise
        return ctypes.CDLL(found)


def check_cluster(location: ClusterLocation, options: Options, environ: dict[str, str]) -> Findings:
    """The cluster file, and whether its coordinators can be reached."""
    text = location.connection_string
    if text is None:
        path = location.cluster_file or default_cluster_file(environ)
        finding, text = read_cluster_file(path)
        yield finding
    if text is not None:
        addresses = text.rpartition("@")[2].split(",")
        yield from _coordinators(addresses)
        yield from check_tls(addresses, options, environ)


def check_tls(addresses: Sequence[str], options: Options, environ: dict[str, str]) -> Findings:
    """Whether the connection is encrypted, and the files for it."""
    named = {
        name: getattr(options, f"tls_{name}_file") or environ.get(f"FDB_TLS_{name.upper()}_FILE")
        for name in ("certificate", "key", "ca")
    }
    if not any(address.endswith(":tls") for address in addresses):
        if any(named.values()):
            step = "Write host:port:tls for each coordinator in the cluster file, once the servers use TLS."
            yield Finding("warn", "TLS", "off: files are named, but no coordinator has :tls", step)
        else:
            yield Finding("ok", "TLS", "off: keep the cluster's network private (docs: SECURITY.md)")
        return
    for name, path in named.items():
        yield _tls_file(name, path)


def _tls_file(name: str, path: str | None) -> Finding:
    what = f"TLS {name}"
    if path is None:
        return Finding("ok", what, "the client library's default")
    if not os.access(path, os.R_OK):
        return Finding(
            "fail",
            what,
            f"{path} can't be read",
            f"Name another file in tls_{name}_file, or give this user read access.",
        )
    if name == "key" and Path(path).stat().st_mode & 0o077:
        return Finding("warn", what, f"{path} is open to others", f"chmod 600 {path}")
    return Finding("ok", what, path)


def read_cluster_file(path: Path) -> tuple[Finding, str | None]:
    """A finding, and the connection string if there is one."""
    copy = "Copy it from a server of the cluster, or name another one in the URL, fdb:////path, or in FDB_CLUSTER_FILE."
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except OSError as error:
        return Finding("fail", "cluster file", f"{path}: {error.strerror}", copy), None
    except UnicodeDecodeError:
        return Finding("fail", "cluster file", f"{path}: not text", copy), None
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) != 1 or not is_connection_string(lines[0]):
        step = f"It must hold one line, description:id@host:port[,host:port]. {copy}"
        return Finding("fail", "cluster file", f"{path}: unreadable", step), None
    if not os.access(path, os.W_OK) or not os.access(path.parent, os.W_OK):
        step = "Give the workers' user write access to it and its folder: the client updates it when coordinators move."
        return Finding("warn", "cluster file", f"{path} is read-only", step), lines[0]
    return Finding("ok", "cluster file", str(path)), lines[0]


def _coordinators(addresses: Sequence[str]) -> Findings:
    unreachable = [address for address in addresses if not _answers(address.removesuffix(":tls"))]
    reached = f"{len(addresses) - len(unreachable)} of {len(addresses)} reachable"
    if len(unreachable) * 2 >= len(addresses):
        step = "Check that fdbserver runs and that no firewall blocks it. The cluster needs most of its coordinators."
        yield Finding("fail", "coordinators", f"{reached}; not: {', '.join(unreachable)}", step)
    elif unreachable:
        step = "Bring them back: the cluster works without them, but not if more fail."
        yield Finding("warn", "coordinators", f"{reached}; not: {', '.join(unreachable)}", step)
    else:
        yield Finding("ok", "coordinators", reached)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), COORDINATOR_TIMEOUT_S).close()
    except OSError:
        return False
    return True


# -- the store -----------------------------------------------------------------------------------------------------


def check_store(location: Location, options: Options) -> Findings:
    """Open the store as a worker would, and look into it."""
    if isinstance(location, SqliteLocation) and location.is_default and location.is_absent:
        yield Finding("ok", "store", "not opened, because it is not in use yet")
        return
    clock = Clock()
    begin = clock.monotonic()
    try:
        engine = connect.open_store(location, options, timeout_s=options.connect_timeout)
    except KombuFDBError as error:
        yield _failure("store", error)
        return
    yield Finding("ok", "store", f"answers after {1000 * (clock.monotonic() - begin):.0f} ms, format version is known")
    with closing(engine.database):
        if isinstance(location, SqliteLocation):
            yield check_damage(str(location.path.resolve()))
        yield from _contents(engine)
        if isinstance(location, ClusterLocation):
            yield from check_distance(engine, options, clock)


def check_damage(path: str) -> Finding:
    """Whether SQLite finds all of the file whole: what only reads it notices what it happens to come by.

    In a thread of its own, as before 3.41, SQLite walks through all pages of a table deaf to its progress handler.
    """
    found: list[Finding] = []
    look = threading.Thread(target=lambda: found.append(_look(path)), daemon=True)
    try:
        start(look)
    except RuntimeError:  # the system has no thread left
        return _look(path)
    look.join(LOOK_S)
    too_long = Finding("ok", "damage", f"not looked for in all of the file: it takes more than {LOOK_S:g} s")
    return found[0] if found else too_long


def _look(path: str) -> Finding:
    try:
        with closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True)) as connection:
            connection.execute("PRAGMA mmap_size=0")  # as ``open_file.connect`` says
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except sqlite3.Error as error:
        return _failure("damage", explain(error, path))
    if found == "ok":
        return Finding("ok", "damage", "none")
    return Finding("fail", "damage", " ".join(found.split()), explain(damage(), path).attributes["fix"])


def _contents(engine: Engine) -> Findings:
    try:
        queues = engine.inspect.queues()
        live = sum(each.open and not each.is_internal for each in engine.inspect.sessions())
        asides = engine.upkeep.asides()
    except KombuFDBError as error:
        yield _failure("content", error)
        return
    own = {name.removesuffix(DEAD_SUFFIX) for name in queues if not is_internal(name)}
    held = [queues[name] for name in own if name in queues]
    counts = [sum(getattr(each, state) for each in held) for state in ("ready", "delayed", "leased")]
    dead = sum(queues[name + DEAD_SUFFIX].ready for name in own if name + DEAD_SUFFIX in queues)
    yield Finding(
        "ok",
        "content",
        f"{plural(len(own), 'queue')}: {plural(counts[0], 'message')} ready, {counts[1]:,} delayed, "
        f"{counts[2]:,} leased, {dead:,} dead; {plural(live, 'session')}",
    )
    if newer := {name: each.newer for name, each in queues.items() if each.newer}:
        found = f"{sum(newer.values())} messages of a newer version, in {', '.join(map(repr, newer))}"
        yield Finding("warn", "newer messages", found, NEWER_STEP)
    for aside in asides:
        yield Finding("warn", "set aside", str(aside), ASIDE_STEP)


def check_distance(engine: Engine, options: Options, clock: Clock) -> Findings:
    """How long a round trip and a commit take, and whether the options leave time for them.

    ``operation_timeout`` must hold the longest call four times, as a call that conflicts with another runs again.
    ``session_ttl`` must hold six heartbeats, one after the other. A worker beats six times in a TTL, and waits between
    two beats; if a beat takes longer than that wait, fewer than three are left, and a short pause of the cluster is
    enough to have the worker declared dead.
    """
    try:
        trip_s, commit_s = _distance(engine, options.connect_timeout, clock)
    except KombuFDBError as error:
        # Only a warning: the store has just answered, and a service does not start if its doctor reports a failure.
        yield Finding("warn", "distance", f"not measured: {error}", "Run the doctor again.")
        return
    least = {
        "operation_timeout": CALL_RUNS * (CALL_TRIPS * trip_s + commit_s),
        "session_ttl": BEATS * (BEAT_TRIPS * trip_s + commit_s),
    }
    found = f"a round trip takes {1000 * trip_s:.1f} ms, a commit {1000 * commit_s:.1f} ms"
    if small := [f"{name} to at least {math.ceil(s)}" for name, s in least.items() if getattr(options, name) < s]:
        step = f"In broker_transport_options, set {' and '.join(small)}, or run the workers nearer to the cluster."
        yield Finding("warn", "distance", found, step)
    else:
        yield Finding("ok", "distance", found)


def _distance(engine: Engine, timeout_s: float, clock: Clock) -> tuple[float, float]:
    """Medians of a round trip and of a commit, which writes but leaves nothing; of fewer samples if they are slow."""
    key = engine.transactions.keys.token(random_id(), 0)
    begun, samples = clock.monotonic(), list[tuple[float, float]]()
    while len(samples) < SAMPLES and (not samples or clock.monotonic() - begun < timeout_s):
        transaction = engine.database.begin(timeout_s=timeout_s)
        try:
            start = clock.monotonic()
            transaction.get(key, snapshot=True)
            answered = clock.monotonic()
            transaction.clear(key)
            transaction.commit()
        finally:
            transaction.cancel()
        # The read has also waited for a read version.
        samples.append(((answered - start) / 2, clock.monotonic() - answered))
    trips, commits = zip(*samples, strict=True)
    return statistics.median(trips), statistics.median(commits)


def _failure(what: str, error: KombuFDBError) -> Finding:
    return Finding("fail", what, error.diagnosis, error.attributes.get("fix") or "")


# -- all of it -----------------------------------------------------------------------------------------------------


def examine(url: str, given: dict[str, Any], environ: dict[str, str]) -> Findings:
    """Every check that applies to ``url``."""
    yield from check_software()
    yield from check_schemes()
    try:
        options = parse_options(given)
        location = locate(parse_url(url), options, environ)
    except OptionError as error:
        yield _failure("options", error)
        return
    ignored = {name: why for name in given if (why := why_ignored(name)) is not None}
    taken = ", ".join(f"{name}={value!r}" for name, value in given.items() if name not in ignored)
    yield Finding("ok", "options", taken or "defaults")
    for name, why in ignored.items():
        yield Finding("warn", "options", f"{name} does nothing here: {why}", f"Remove {name} from the options.")
    yield Finding("ok", "broker", str(location))
    yield from check_clock(location)
    fatal = False
    found: Findings = iter(())
    if isinstance(location, SqliteLocation):
        found = check_file(location)
    elif isinstance(location, ClusterLocation):
        found = chain(check_library(), check_cluster(location, options, environ))
    for finding in found:
        fatal = fatal or finding.level == "fail"
        yield finding
    if not fatal:
        yield from check_store(location, options)


def main(argv: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Print all findings. Returns 1 if one of them is a failure, else 0."""
    parser = argparse.ArgumentParser(prog="python -m kombu_fdb.doctor", description="Check a celery-fdb set-up.")
    parser.add_argument("url", nargs="?", default="fdb+sqlite://", help="your broker_url; default: %(default)s")
    parser.add_argument(
        "--options", type=_json_object, default={}, metavar="JSON", help="your broker_transport_options"
    )
    arguments = parser.parse_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # ``LC_ALL=C``: as the command line does
    levels = []
    for finding in examine(arguments.url, arguments.options, dict(os.environ)):
        levels.append(finding.level)
        write(f"{finding.level:<5} {finding.what:<15} {plain(finding.found)}")
        if finding.fix:
            write(f"{'':<5} {'':<15} -> {finding.fix}")
    failed, doubtful = levels.count("fail"), levels.count("warn")
    write("all well" if not failed + doubtful else f"{failed} failed, {doubtful} to check")
    return 1 if failed else 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('not a JSON object, such as {"session_ttl": 30}')
    return value


if __name__ == "__main__":
    sys.exit(main())
