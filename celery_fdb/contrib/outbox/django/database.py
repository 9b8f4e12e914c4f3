"""An outbox in one of Django's databases.

Rows are published where they were committed, by ``on_commit``: the first of a transaction's callbacks publishes all of
its rows, the others find nothing to do. The ids may include those of rows that were rolled back: these find no row.

After a broker did not answer, this process leaves its rows to the relay for :data:`QUIET_S`, so that requests do not
wait for it one after the other.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

from celery import Celery
from celery.canvas import Signature
from django.db import connections, router, transaction
from kombu.exceptions import OperationalError

from celery_fdb.contrib.django import conf
from celery_fdb.contrib.outbox import CLOCKS, Outbox, OutboxTable
from celery_fdb.contrib.outbox.django.models import OutboxRow
from kombu_fdb.errors import OptionError

logger = logging.getLogger(__name__)

QUIET_S = 10.0
#: Rows of one transaction that are published right after it; the relay publishes those before them.
MOST_AT_ONCE = 1000
_MARK = "%s"
_CLOCKS = dict(zip(("sqlite", "postgresql", "mysql"), CLOCKS, strict=True))


def outbox(using: str | None = None) -> DjangoOutbox:
    """The outbox of this process. Raises ``OptionError`` if the project has no Celery app."""
    return _outbox(conf.celery_app(conf.read()), using or router.db_for_write(OutboxRow))


class DjangoOutbox(Outbox):
    """``using``: the database's alias."""

    how_to_make_it = 'add "celery_fdb.contrib.outbox.django" to INSTALLED_APPS, and run `manage.py migrate`'

    def __init__(self, app: Celery, using: str) -> None:
        super().__init__(app, partial(connections.__getitem__, using), _MARK)
        self._using = using
        self._quiet_until = 0.0

    def put(self, signature: Signature) -> Any:
        """Write the row into the current transaction, and have it published after it. Returns the result.

        Without ``atomic`` and autocommit, Django calls nothing after a commit, so the relay publishes the row.
        """
        connection = connections[self._using]
        with connection.cursor() as cursor:
            row_id, result = self.write(cursor, signature)
        if connection.in_atomic_block or connection.get_autocommit():
            self._waiting.append(row_id)
            transaction.on_commit(self.publish_committed, using=self._using)
        return result

    @property
    def _waiting(self) -> deque[str]:
        """Rows that this connection wrote and has not published."""
        found: deque[str] = vars(connections[self._using]).setdefault("_celery_outbox", deque(maxlen=MOST_AT_ONCE))
        return found

    def publish_committed(self) -> None:
        """Publish the rows. Raises nothing: they are committed, and a relay publishes those that this can't."""
        ids = list(self._waiting)
        self._waiting.clear()
        if not ids or self._clock.monotonic() < self._quiet_until:
            return
        try:
            with self.opened() as table:
                self.relay_some(table, len(ids), ids)
        except OperationalError as error:
            self._quiet_until = self._clock.monotonic() + QUIET_S
            logger.warning("the broker does not answer, fdb_relay will publish the tasks: %s", error)
        except Exception:
            logger.exception("fdb_relay will publish the tasks")

    @contextmanager
    def opened(self) -> Iterator[OutboxTable]:
        """The table, through this thread's connection, which is closed only if it is broken."""
        connection = connections[self._using]
        features: Any = connection.features
        try:
            skip_locked = bool(features.has_select_for_update_skip_locked)
            yield OutboxTable(partial(_cursor, self._using), _MARK, _clock(connection.vendor), skip_locked=skip_locked)
        except Exception:
            connection.close_if_unusable_or_obsolete()
            raise


#: One for each application and database.
_outbox = lru_cache(DjangoOutbox)


def _clock(vendor: str) -> str:
    """The clock's expression for this database. Raises ``OptionError``."""
    if vendor not in _CLOCKS:
        raise OptionError("the outbox does not know this kind of database", vendor=vendor, known=", ".join(_CLOCKS))
    return _CLOCKS[vendor]


@contextmanager
def _cursor(using: str) -> Iterator[Any]:
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        yield cursor
