"""A changed export file, with a right checksum: an import stores what can be read, or says which line can't be.

The oracle: ``FormatError``, or another error of ours that names what the target refuses; what was stored before it can
be taken, exported and counted; and the same command on the file as it was goes on to the end.
"""

import hashlib
import json
from contextlib import ExitStack, suppress

import pytest
from damage import ODD
from kit.conformance.queue import Bench
from kit.faults import FaultyDatabase
from kit.whole.verbs import VERBS
from store_rows import QueueRows

from celery_fdb.operations.transfer import broker_source, export_to, file_source, import_from
from kombu_fdb import Broker
from kombu_fdb.errors import KombuFDBError
from kombu_fdb.model import View
from kombu_fdb.settings.location import MemoryLocation


def on(bench):
    return Broker.on(MemoryLocation(bench.namespace, bench.namespace), bench.engine)


@pytest.fixture
def export(tmp_path):
    with ExitStack() as ends:
        store = QueueRows(ends)
        store.fill()
        VERBS["upkeep.regain_part"](store.stage)  # else the message of a newer version is refused
        export_to(tmp_path / "export", broker_source(store.broker, leased=True), lambda _: None)
    return tmp_path / "export"


def test_a_changed_export_file(fuzz, export, tmp_path):
    lines = export.read_bytes().splitlines()[:-1]
    changed = tmp_path / "changed"

    def target(rng):
        odd = list(lines)
        at = rng.randrange(len(odd))
        odd[at] = json.dumps(with_an_odd_value(rng, json.loads(odd[at]))).encode()
        changed.write_bytes(signed(odd))
        bench = Bench(FaultyDatabase())
        with on(bench) as broker:
            with suppress(KombuFDBError):
                import_from(file_source(changed), broker, lambda _: None)
            look_and_take(bench, broker, tmp_path)
            with suppress(KombuFDBError):  # what the odd line declared may contradict
                import_from(file_source(export), broker, lambda _: None, again=True)
            bench.put(b"new", queue="new")
            assert bench.payloads(1, "new") == [b"new"]

    fuzz(target)


def look_and_take(bench, broker, folder):
    for queue in broker.queues():
        bench.engine.inspect.peek(queue, 100)
        bench.engine.inspect.page(queue, View("delayed"), 100)
    bench.duties().run_once()
    found = bench.engine.messages.claim(bench.session, [*broker.queues()], 50) if broker.queues() else []
    bench.engine.messages.release([each.lease for each in found])
    export_to(folder / "again", broker_source(broker, leased=True), lambda _: None)


def signed(lines):
    text = b"".join(line + b"\n" for line in lines)
    messages = sum(line.startswith(b'{"message"') for line in lines)
    end = {"entries": len(lines) - 1, "messages": messages, "sha256": hashlib.sha256(text).hexdigest()}
    return text + json.dumps({"end": end}).encode() + b"\n"


def with_an_odd_value(rng, document):
    """Somewhere in it."""
    if isinstance(document, dict | list) and document and rng.random() < 0.85:
        names = [*document] if isinstance(document, dict) else [*range(len(document))]
        name = rng.choice(names)
        if isinstance(document, dict) and rng.random() < 0.1:
            del document[name]
        else:
            document[name] = with_an_odd_value(rng, document[name])
        return document
    return rng.choice([*ODD, 2**64, -(2**70), 1.5, "00", "\x1b[31m", "x" * 300])


@pytest.mark.parametrize("end", [{}, {"end": 5}, {"end": {"sha256": 5}}, {"end": {"messages": "x"}}, [1], "[" * 90_000])
def test_an_odd_end(export, end):
    lines = export.read_bytes().splitlines()[:-1]
    last = end.encode() if isinstance(end, str) else json.dumps(end).encode()
    export.write_bytes(b"".join(line + b"\n" for line in [*lines, last]))
    with pytest.raises(KombuFDBError):
        file_source(export)
