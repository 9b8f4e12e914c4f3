"""TLS towards the cluster: which certificate, key and authorities the client library uses.

They are the library's network options, so a process has one set of them, fixed when it first opens a cluster. What is
not named here the library takes from ``FDB_TLS_CERTIFICATE_FILE``, ``FDB_TLS_KEY_FILE``, ``FDB_TLS_CA_FILE``,
``FDB_TLS_VERIFY_PEERS`` and ``FDB_TLS_PASSWORD`` (https://apple.github.io/foundationdb/tls.html). Whether TLS is spoken
at all is up to the cluster file: to a coordinator ``host:port:tls``.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from kombu_fdb.errors import StoreUnavailable

#: Where the module of the binding keeps what it was told; a forked child's is a new module.
_ATTRIBUTE = "_kombu_fdb_tls"


class Tls(NamedTuple):
    """Paths, and the client's constraints on its peers; None for the library's own choice."""

    certificate_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    verify_peers: str | None = None


def apply(fdb: Any, tls: Tls) -> None:
    """Tell the library, before it connects.

    Raises ``StoreUnavailable`` for a file that can't be read, or if the process has opened a cluster with others.
    """
    if tls == Tls():
        return
    if getattr(fdb, _ATTRIBUTE, None) == tls:
        return
    _check_files(tls)
    if fdb.impl._network_thread:
        raise StoreUnavailable(
            "this process has opened a cluster with other TLS settings",
            fix="FoundationDB's client has one set per process: give every broker the same.",
        )
    options = fdb.options
    setters = (options.set_tls_cert_path, options.set_tls_key_path, options.set_tls_ca_path)
    for setter, value in zip((*setters, _verify(options)), tls, strict=True):
        if value is not None:
            setter(value)
    setattr(fdb, _ATTRIBUTE, tls)


def _verify(options: Any) -> Any:
    return lambda constraints: options.set_tls_verify_peers(constraints.encode())


def _check_files(tls: Tls) -> None:
    for name, path in tls._asdict().items():
        if name.endswith("_file") and path is not None and not os.access(path, os.R_OK):
            raise StoreUnavailable(
                "a TLS file can't be read",
                option=f"tls_{name}",
                path=path,
                fix="Check that it exists and that this user can read it.",
            )
