"""The brokers that play it: ours, and the others' servers, which `make bench` starts as well."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kit.celery_parity.stage import Broker, Observed, Stage
from kit.rabbitmq import Node
from kit.starter import Starter

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "parity" / "celery_recorded.json"
APPLICATION = "kit.celery_parity.application"
PEERS = ("redis", "rabbitmq")
#: And ours: a file, the same with ``celery_fdb.install``, and a cluster.
BROKERS = (*PEERS, "sqlite", "installed")


def missing(name: str) -> str | None:
    """Why it can't be here."""
    if name in PEERS and importlib.util.find_spec("redis") is None:
        return "the client of Redis is not installed"
    servers = {"redis": ["redis-server"], "rabbitmq": ["rabbitmq-server", "redis-server"]}.get(name, [])
    gone = [server for server in servers if shutil.which(server) is None]
    return f"no {gone[0]} on PATH" if gone else None


@contextmanager
def broker(name: str, folder: Path, url: str | None = None) -> Iterator[Broker]:
    """``url``: of ours, if it is not to be a file."""
    if name in PEERS:
        with _peer(name, folder) as peer:
            yield peer
    else:
        at = url or f"fdb+sqlite:///{folder}/broker.db"
        yield Broker(name, at, at, folder, {"session_ttl": 5.0}, installed=name == "installed")


@contextmanager
def _peer(name: str, folder: Path) -> Iterator[Broker]:
    """Results are in Redis, as RabbitMQ has no chords."""
    spec = importlib.util.spec_from_file_location("bench_brokers", ROOT / "bench" / "brokers.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules, {"bench_brokers": bench}))
        spec.loader.exec_module(bench)
        redis = stack.enter_context(bench.redis("everysec"))
        results = redis.url.removesuffix("/0") + "/1"
        if name == "redis":
            yield Broker(name, redis.url, results, folder)
        else:
            server = stack.enter_context(Node())
            yield Broker(name, server.url, results, folder, {"confirm_publish": True})


def play(at: Broker, expected: dict[str, Observed] | None = None) -> dict[str, Observed]:
    """All situations, once. ``expected``: what they come to."""
    settings = {name: value for name, value in at.env.items() if name.startswith("PARITY_")}
    with patch.dict(os.environ, settings), Starter() as starter:
        sys.modules.pop(APPLICATION, None)
        application: Any = importlib.import_module(APPLICATION)
        try:
            return Stage(at, starter, application, expected).play()
        finally:
            application.app.pool.force_close_all()
            application.app.close()
            sys.modules.pop(APPLICATION)


def came_to(name: str) -> dict[str, Observed]:
    """What is recorded of a broker."""
    recorded = json.loads(RECORDED.read_text())
    return {
        situation: next(each["came_to"] for each in found if name in each["on"])
        for situation, found in recorded.items()
    }
