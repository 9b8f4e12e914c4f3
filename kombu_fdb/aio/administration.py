"""For a broker's operator: what it holds as a whole, how it is wired, and moving it to another store."""

from __future__ import annotations

from kombu_fdb.aio.calls import Face, stream, verb
from kombu_fdb.api import administration

__all__ = ["Inspection", "Migration", "Topology"]


class Inspection(Face[administration.Inspection]):
    """Get it from :attr:`.broker.Broker.inspect`."""

    facts = verb(administration.Inspection.facts)
    sessions = verb(administration.Inspection.sessions)
    totals = verb(administration.Inspection.totals)
    key_totals = verb(administration.Inspection.key_totals)
    samples = verb(administration.Inspection.samples)
    set_aside = verb(administration.Inspection.set_aside)


class Topology(Face[administration.Topology]):
    """Get it from :attr:`.broker.Broker.topology`."""

    exchanges = verb(administration.Topology.exchanges)
    bindings = verb(administration.Topology.bindings)
    route = verb(administration.Topology.route)
    declare_exchange = verb(administration.Topology.declare_exchange)
    delete_exchange = verb(administration.Topology.delete_exchange)
    bind = verb(administration.Topology.bind)
    unbind = verb(administration.Topology.unbind)


class Migration(Face[administration.Migration]):
    """Get it from :attr:`.broker.Broker.migration`."""

    dump = stream(administration.Migration.dump)
    dedups = stream(administration.Migration.dedups)
    restore = verb(administration.Migration.restore)
    restore_dedups = verb(administration.Migration.restore_dedups)
    restore_queue = verb(administration.Migration.restore_queue)
    restore_control = verb(administration.Migration.restore_control)
    restore_limits = verb(administration.Migration.restore_limits)
    restore_binding = verb(administration.Migration.restore_binding)
    finished = verb(administration.Migration.finished)
    finish = verb(administration.Migration.finish)
