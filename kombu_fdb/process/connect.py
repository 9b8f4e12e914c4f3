"""The composition root: from options and a location to an open store with the queue engine on it.

Only this module names drivers, and it imports one when it is first needed: an application on SQLite needs no
FoundationDB. No shipped code imports the test kit, so ``kombu_fdb.testing.stores`` sets ``open_memory`` while tests use
stores in memory.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

from kombu_fdb.engine.facade.engine import Engine
from kombu_fdb.engine.work import Environment
from kombu_fdb.errors import OptionError, StoreUnavailable
from kombu_fdb.primitives.clock import Clock, random_id
from kombu_fdb.settings.location import FOUR_SLASHES, ClusterLocation, Location, SqliteLocation
from kombu_fdb.settings.options import Options
from kombu_fdb.store.protocol import Database, Transaction

#: Opens a store in memory; None outside of tests.
open_memory: Callable[[str], Database] | None = None


# A driver is imported when the first store is opened, the code that joins transactions at its first use. If another
# thread forked during such an import, the child would wait forever for the lock of the half-imported module. So forks
# wait for imports.
_importing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release
    )


def open_store(location: Location, options: Options, *, timeout_s: float) -> Engine:
    """Open the store and check that it answers, each within ``timeout_s`` seconds.

    Raises ``StoreUnavailable`` or ``FormatError``, each with the fix, and leaves nothing open.
    """
    database = _open_database(location, options, timeout_s)
    try:
        verify(database, location, timeout_s=timeout_s)
    except BaseException:
        database.close()
        raise
    return Engine(
        database,
        location.namespace,
        Environment(
            Clock(),
            random_id,
            random.Random(),
            call_s=options.operation_timeout,
            publish_s=options.publish_timeout,
            max_message_size=options.max_message_size,
            delivery_limit=options.delivery_limit,
        ),
    )


def verify(database: Database, location: Location, *, timeout_s: float) -> None:
    """Run one small transaction. Raises ``StoreUnavailable`` or ``FormatError``."""
    environment = Environment(Clock(), random_id, random.Random(), call_s=timeout_s)
    Engine(database, location.namespace, environment).check_format()


def join(database: Database, location: Location, tr: Any) -> Transaction:
    """The application's FoundationDB transaction ``tr``, wrapped for the engine's verbs. Raises ``OptionError``."""
    if isinstance(location, SqliteLocation):
        raise OptionError(
            "the broker is not on FoundationDB, so it can't take part in its transactions",
            broker=str(location),
            fix="Use the broker fdb://, or the outbox of celery_fdb.contrib.outbox for an SQL database.",
        )
    with _importing:
        from kombu_fdb.store.foundationdb.database import join_transaction

    return join_transaction(database, tr)


def _open_database(location: Location, options: Options, timeout_s: float) -> Database:
    if isinstance(location, SqliteLocation):
        return _open_sqlite(location, options, timeout_s)
    if isinstance(location, ClusterLocation):
        return _open_cluster(location, options, timeout_s)
    if open_memory is None:
        raise StoreUnavailable(
            "stores in memory are for tests",
            location=str(location),
            fix="Use the fixture fdb_broker of the pytest plugin, or kombu_fdb.testing.stores.MemoryStores.",
        )
    return open_memory(location.name)


def _open_sqlite(location: SqliteLocation, options: Options, timeout_s: float) -> Database:
    with _importing:
        from kombu_fdb.store.sqlite.database import SqliteDatabase

    try:
        location.create_directory()
    except OSError as error:
        raise StoreUnavailable(
            "the directory of the default database can't be created",
            path=str(location.path.parent),
            reason=error.strerror,
            fix="Name a file in the URL: fdb+sqlite:////path/broker.db.",
        ) from error
    if location.is_relative and not location.path.parent.is_dir():
        folder = str(location.path.parent)
        raise StoreUnavailable("a relative path, and its directory does not exist", path=folder, fix=FOUR_SLASHES)
    return SqliteDatabase.open(str(location.path), synchronous=options.synchronous, timeout_s=timeout_s)


def _open_cluster(location: ClusterLocation, options: Options, timeout_s: float) -> Database:
    with _importing:
        from kombu_fdb.store.foundationdb.database import FoundationDatabase

    return FoundationDatabase.open(
        cluster_file=None if location.cluster_file is None else str(location.cluster_file),
        connection_string=location.connection_string,
        tls={
            "certificate_file": options.tls_certificate_file,
            "key_file": options.tls_key_file,
            "ca_file": options.tls_ca_file,
            "verify_peers": options.tls_verify_peers,
        },
        timeout_s=timeout_s,
    )
