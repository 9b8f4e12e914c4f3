"""Parity with RabbitMQ: ``python -m kit.parity FIRST [LAST]``.

From one seed a program is made (``program.py``): what users of kombu do to exchanges, queues and messages. It runs, as
it is, on a real RabbitMQ (``rabbitmq.py``) and on our transport (``ours.py``); after each step everything that a
program can observe is compared (``broker.py``, ``compare.py``). What differs deliberately is in a table of
``docs/migrating.md``; the rules in ``deviations.py`` know how it looks. Anything else is a defect, and its program is
made small (``shrink.py``).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence

from kit.parity.compare import Bench, Verdict, compare
from kit.parity.deviations import RULES, documented
from kit.parity.ours import Ours
from kit.parity.program import make_program
from kit.parity.rabbitmq import RabbitMQ
from kit.parity.shrink import shrink
from kit.rabbitmq import Node, rabbitmq_unavailable_reason
from kombu_fdb.process.client import close_clients
from kombu_fdb.testing.fdbserver import Cluster, fdb_unavailable_reason

__all__ = [
    "RULES",
    "Bench",
    "Verdict",
    "benches",
    "compare",
    "documented",
    "make_program",
    "rabbitmq_unavailable_reason",
    "shrink",
]


@contextlib.contextmanager
def benches(stores: Sequence[str] | None = None) -> Iterator[dict[str, Bench]]:
    """RabbitMQ beside each of our stores; without a choice, beside all that run here."""
    if stores is None:
        stores = ["sqlite", *(["fdb"] if fdb_unavailable_reason() is None else [])]
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node())
        urls = {}
        if "sqlite" in stores:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            urls["sqlite"] = f"fdb+sqlite:///{folder}/broker.db"
        if "fdb" in stores:
            urls["fdb"] = f"fdb://{stack.enter_context(Cluster()).connection_string}"
        stack.callback(close_clients)
        yield {name: bench(node, url, name) for name, url in urls.items()}


def bench(node: Node, url: str, name: str) -> Bench:
    """RabbitMQ beside one store."""
    return Bench(
        lambda patience_s: RabbitMQ(node, patience_s=patience_s),
        lambda patience_s: Ours(url, name=name, patience_s=patience_s),
        documented(),
    )
