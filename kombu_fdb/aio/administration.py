"""For a broker's operator: what it holds as a whole, how it is wired, and moving it to another store."""

from __future__ import annotations

from kombu_fdb.aio.calls import Face, stream, verb
from kombu_fdb.api.administration import inspection, migration, topology

__all__ = ["Inspection", "Migration", "Topology"]


class Inspection(Face[inspection.Inspection]):
    """Get it from :attr:`.broker.Broker.inspect`."""

    facts = verb(inspection.Inspection.facts)
    sessions = verb(inspection.Inspection.sessions)
    totals = verb(inspection.Inspection.totals)
    key_totals = verb(inspection.Inspection.key_totals)
    samples = verb(inspection.Inspection.samples)
    set_aside = verb(inspection.Inspection.set_aside)


class Topology(Face[topology.Topology]):
    """Get it from :attr:`.broker.Broker.topology`."""

    exchanges = verb(topology.Topology.exchanges)
    bindings = verb(topology.Topology.bindings)
    route = verb(topology.Topology.route)
    declare_exchange = verb(topology.Topology.declare_exchange)
    delete_exchange = verb(topology.Topology.delete_exchange)
    bind = verb(topology.Topology.bind)
    unbind = verb(topology.Topology.unbind)


class Migration(Face[migration.Migration]):
    """Get it from :attr:`.broker.Broker.migration`."""

    dump = stream(migration.Migration.dump)
    dedups = stream(migration.Migration.dedups)
    restore = verb(migration.Migration.restore)
    restore_dedups = verb(migration.Migration.restore_dedups)
    restore_queue = verb(migration.Migration.restore_queue)
    restore_control = verb(migration.Migration.restore_control)
    restore_limits = verb(migration.Migration.restore_limits)
    restore_binding = verb(migration.Migration.restore_binding)
    finished = verb(migration.Migration.finished)
    finish = verb(migration.Migration.finish)
