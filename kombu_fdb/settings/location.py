"""Where the store is: the URL's parts as a :class:`SqliteLocation` or a :class:`ClusterLocation`.

==================================== =============================================================================
``fdb+sqlite:////var/lib/app/b.db``  this file; four slashes for an absolute path, ``~`` is expanded
``fdb+sqlite://``                    one file per user, see :func:`default_sqlite_path`
``fdb://``                           the client library's cluster file, see :func:`default_cluster_file`
``fdb:///shop``                      the same cluster, in the namespace ``shop``
``fdb:////etc/app.cluster``          this cluster file; or name it in the option ``cluster_file``
``fdb://d:id@10.0.0.1:4500/shop``    the cluster file's content, with one coordinator
``fdb+memory://name``                a store of this process, for tests; see ``kombu_fdb.testing.stores``
==================================== =============================================================================

Nothing here touches a file's content or the network. A mistake is an :exc:`~kombu_fdb.errors.OptionError`, with the
next step in its ``fix``.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from kombu_fdb.errors import OptionError
from kombu_fdb.primitives.ranges import utf8
from kombu_fdb.settings.options import LONGEST_NAMESPACE, Options

#: As in ``_kombu_fdb_autoload.py``, which must not import this.
SCHEMES = ("fdb", "fdb+sqlite")
#: Not one of the above, as it opens nothing without the test kit.
MEMORY_SCHEME = "fdb+memory"

DEFAULT_NAMESPACE = "default"
FOUR_SLASHES = "An absolute path takes four slashes: fdb+sqlite:////var/lib/app/broker.db."


class UrlParts(NamedTuple):
    """A URL as kombu takes it apart."""

    scheme: str
    hostname: str | None = None
    port: int | None = None
    userid: str | None = None
    password: str | None = None
    virtual_host: str | None = None

    def __repr__(self) -> str:
        """Without secrets: it may appear in a log, or in a traceback with locals."""
        path = self.virtual_host and masked_url(self.virtual_host)
        shown = self._replace(password="**" if self.password else None, virtual_host=path)
        return f"UrlParts({', '.join(f'{name}={value!r}' for name, value in shown._asdict().items())})"

    def url(self, mask: str | None) -> str:
        """For :func:`parse_url`. ``mask`` replaces secrets; None: they are written out."""
        host = _in_brackets(self.hostname or "") + (f":{self.port}" if self.port else "")
        path = "" if self.virtual_host in {None, "/"} else str(self.virtual_host)
        if self.userid or self.password:
            secret = quote(self.password or "", safe="") if mask is None else mask
            host = f"{quote(self.userid or '', safe='')}{f':{secret}' if self.password else ''}@{host}"
        return f"{self.scheme}://{host}/{quote(path if mask is None else masked_url(path), safe='/:@*+')}"


@dataclass(frozen=True, slots=True)
class SqliteLocation:
    """One file on this host. ``path`` is absolute."""

    path: Path
    namespace: str = DEFAULT_NAMESPACE
    #: Whether the file was not named: its directory is ours to create, readable by this user only.
    is_default: bool = False
    #: Whether the URL's path was relative: which file it is depends on the folder that a process starts in.
    is_relative: bool = field(default=False, compare=False)

    def __repr__(self) -> str:
        return f"SqliteLocation({self}, namespace={masked_url(self.namespace)!r})"

    def __str__(self) -> str:
        return f"fdb+sqlite:///{masked_url(str(self.path))}"

    @property
    def is_absent(self) -> bool:
        """Whether the file is absent. False if that can't be found out: then opening it raises the error."""
        try:
            self.path.stat()
        except FileNotFoundError:
            return True
        except OSError:
            pass
        return False

    def create_directory(self) -> None:
        """Create the directory of the default file. A directory that a user named must exist. Raises ``OSError``."""
        if self.is_default:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


@dataclass(frozen=True, slots=True)
class ClusterLocation:
    """A FoundationDB cluster: by connection string, by cluster file, or (neither) by the client's default file."""

    namespace: str = DEFAULT_NAMESPACE
    cluster_file: Path | None = None
    #: ``description:id@host:port``. The id is as good as a password, so it stays out of ``repr`` and logs.
    connection_string: str | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"ClusterLocation({self})"

    def __str__(self) -> str:
        if self.connection_string:
            description, _, coordinators = self.connection_string.partition("@")
            return f"fdb://{description.partition(':')[0]}:**@{coordinators}/{masked_url(self.namespace)}"
        cluster_file = self.cluster_file or default_cluster_file(os.environ)
        return f"fdb:///{masked_url(self.namespace)} ({masked_url(str(cluster_file))})"


@dataclass(frozen=True, slots=True)
class MemoryLocation:
    """A store in this process's memory, by name. Only the test kit opens one."""

    name: str
    namespace: str = DEFAULT_NAMESPACE

    def __str__(self) -> str:
        return f"{MEMORY_SCHEME}://{self.name}"


Location = SqliteLocation | ClusterLocation | MemoryLocation


def parse_url(url: str) -> UrlParts:
    """Take ``url`` apart as kombu does, without kombu. Raises ``OptionError``."""
    url = str(url)  # a path is no URL: the error below says so, and what is one
    if not url.isascii():
        utf8("URL", masked_url(url))
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise OptionError(
            "not a broker URL",
            url=url.rpartition("@")[2][:200],
            fix="Write fdb+sqlite:////absolute/path/broker.db or fdb://.",
        )
    try:
        parts = urllib.parse.urlsplit("//" + url.partition("://")[2])
    except ValueError as error:  # brackets
        raise OptionError(
            "unusable address in the URL",
            reason=masked_url(str(error)),
            fix="Put an IPv6 address in brackets: [::1]:4500.",
        ) from None
    if parts.query:
        names = ", ".join(name for name, _ in urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        raise OptionError("options in the URL", names=names, fix="Put them into broker_transport_options.")
    try:
        port = parts.port
    except ValueError:
        raise OptionError(
            "unusable address in the URL",
            address=parts.netloc.rpartition("@")[2],
            fix="A URL can name one coordinator, host:port. For several, or for TLS, write a cluster file and set "
            "broker_transport_options = {'cluster_file': path}.",
        ) from None
    path = urllib.parse.unquote(parts.path)
    texts = (parts.hostname, parts.username, parts.password, path.removeprefix("/"))
    hostname, userid, password, virtual_host = (urllib.parse.unquote(text or "") or None for text in texts)
    return UrlParts(scheme, hostname, port, userid, password, virtual_host)


#: ``id@`` or ``password@`` in any quoted text: what stands between a colon and an at sign. In a URL that begins so, a
#: secret ends at the last at sign, as it may hold any other character.
_SECRET = re.compile(r"(?<=://)([^:@/\s]*:)\S+(?=@)|(?<=:)[^@/\s]+(?=@)")


def masked_url(text: str) -> str:
    """Without secrets, for messages and ``repr``: a cluster's id is as good as a password, wherever it stands."""
    return _SECRET.sub(r"\1**", text)


def locate(parts: UrlParts, options: Options, environ: Mapping[str, str] | None = None) -> Location:
    """Where the store is. Touches neither files nor network. Raises ``OptionError``.

    ``environ``: for the default path; the process's own if None.
    """
    if parts.hostname == "localhost" and parts.port is None and parts.userid is None:
        parts = parts._replace(hostname=None)  # kombu's placeholder for "no host"
    if parts.scheme == "fdb+sqlite":
        return _locate_file(parts, options, os.environ if environ is None else environ)
    if parts.scheme == "fdb":
        return _locate_cluster(parts, options)
    if parts.scheme == MEMORY_SCHEME:
        return MemoryLocation(parts.hostname or "default", options.namespace or DEFAULT_NAMESPACE)
    raise OptionError("unknown URL scheme", scheme=masked_url(parts.scheme), fix=f"Known: {', '.join(SCHEMES)}.")


def _locate_file(parts: UrlParts, options: Options, environ: Mapping[str, str]) -> SqliteLocation:
    if parts.hostname or parts.userid:
        raise OptionError(
            "a file URL with a host",
            host=parts.hostname,
            fix=FOUR_SLASHES,
        )
    namespace = options.namespace or DEFAULT_NAMESPACE
    name = parts.virtual_host
    if not name or name == "/":
        return SqliteLocation(default_sqlite_path(environ), namespace, is_default=True)
    if ":memory:" in name or "\0" in name:
        raise OptionError(
            "not a file",
            path=masked_url(name),
            fix="A worker's processes share one file: name it, or use kombu's memory://.",
        )
    if name.endswith(("/", os.sep)):
        shown = masked_url(name)
        raise OptionError("a directory instead of a file", path=shown, fix=f"Name a file in it: {shown}broker.db.")
    is_relative = not name.startswith(("/", "~"))
    return SqliteLocation(_absolute(name), namespace, is_relative=is_relative)


def _absolute(name: str) -> Path:
    """``~`` is expanded. Raises ``OptionError``."""
    try:
        return Path(name).expanduser().absolute()
    except (RuntimeError, ValueError) as error:  # no user of that name, or a character that no path has
        raise OptionError(
            "not a path", path=masked_url(name), reason=str(error), fix="Write an absolute path."
        ) from None


def _locate_cluster(parts: UrlParts, options: Options) -> ClusterLocation:
    path = "" if parts.virtual_host in {None, "/"} else str(parts.virtual_host)
    if parts.hostname is None and path.startswith("/"):
        return _cluster(options, cluster_file=_one_of("cluster_file", path, options.cluster_file))
    if parts.hostname is None and ("/" in path or path.endswith(".cluster")):
        raise OptionError(
            "ambiguous path in the URL",
            path=masked_url(path),
            fix=f"A cluster file takes four slashes, fdb:////{masked_url(path)}; the contents of a cluster file take "
            "two, fdb://description:id@host:port/namespace; a namespace contains no slash."
            if "@" in path
            else f"A cluster file takes four slashes, fdb:////{path}; a namespace contains no slash.",
        )
    namespace = _one_of("namespace", path or None, options.namespace)
    if parts.hostname is None:
        return _cluster(options, namespace=namespace, cluster_file=options.cluster_file)
    connection_string = _connection_string(parts)
    if options.cluster_file is not None:
        raise OptionError(
            "two clusters named",
            url=f"{parts.userid}:**@{parts.hostname}:{parts.port}",
            cluster_file=options.cluster_file,
            fix="Remove the cluster_file option, or shorten the URL to fdb://.",
        )
    return ClusterLocation(namespace or DEFAULT_NAMESPACE, None, connection_string)


def _cluster(options: Options, *, namespace: str | None = None, cluster_file: str | None) -> ClusterLocation:
    path = _absolute(cluster_file) if cluster_file else None
    return ClusterLocation(namespace or options.namespace or DEFAULT_NAMESPACE, path)


def _one_of(name: str, from_url: str | None, from_options: str | None) -> str | None:
    """The value of both sources, which must agree if both have one."""
    if from_url is not None and from_options is not None and from_url != from_options:
        raise OptionError(
            "the URL and an option disagree",
            name=name,
            url=masked_url(from_url),
            option=masked_url(from_options),
            fix="Remove it from the URL or from the transport options.",
        )
    if name == "namespace" and from_url is not None and len(from_url.encode()) > LONGEST_NAMESPACE:
        raise OptionError("the namespace is too long", fix=f"At most {LONGEST_NAMESPACE} bytes.")
    return from_url if from_url is not None else from_options


#: https://apple.github.io/foundationdb/administration.html#cluster-file-format
_CONNECTION_STRING = re.compile(r"\w+:[A-Za-z0-9]+@[^\s@,]+:\d+(:tls)?(,[^\s@,]+:\d+(:tls)?)*", re.ASCII)


def is_connection_string(text: str) -> bool:
    """Whether ``text`` is the one line of a cluster file, ``description:id@host:port[,...]``."""
    return _CONNECTION_STRING.fullmatch(text) is not None


def _connection_string(parts: UrlParts) -> str:
    host = _in_brackets(parts.hostname or "")
    text = f"{parts.userid or ''}:{parts.password or ''}@{host}:{parts.port or ''}"
    if not is_connection_string(text):
        raise OptionError(
            "not a FoundationDB connection string",
            url=f"{parts.userid or ''}:**@{host}:{parts.port or ''}",
            fix="Write the contents of the cluster file, fdb://description:id@host:port/namespace, or just fdb:// to "
            "use that file.",
        )
    return text


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def default_sqlite_path(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """The file behind ``fdb+sqlite://``: one per user.

    ``$XDG_DATA_HOME/celery-fdb/broker.db`` (``~/.local/share`` if unset); on macOS
    ``~/Library/Application Support/celery-fdb/broker.db``; on Windows it is in ``%LOCALAPPDATA%``.
    """
    home = Path(environ.get("HOME") or Path.home())
    data = environ.get("XDG_DATA_HOME", "")
    if Path(data).is_absolute():  # the XDG specification says to ignore a relative one
        base = Path(data)
    elif platform == "darwin":
        base = home / "Library" / "Application Support"
    elif platform == "win32":
        base = Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = home / ".local" / "share"
    return base / "celery-fdb" / "broker.db"


def default_cluster_file(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """The cluster file that the client library uses when none is named."""
    named = environ.get("FDB_CLUSTER_FILE")
    if named:
        return Path(named)
    here = Path("fdb.cluster")
    if here.exists():
        return here.absolute()
    root = Path("/usr/local/etc") if platform == "darwin" else Path("/etc")
    return root / "foundationdb" / "fdb.cluster"
