"""The only way to the queue: its verbs in groups, each of which runs them in transactions.

One engine serves one namespace of one store in one process. It holds no thread and no connection to Celery; it is told
the time, and every method may be called from any thread.

What a caller must know about failure (``store/retry.py``): every method either happened entirely, or raised and did not
happen, with one exception. If it raises ``CommitUnknown``, the store stopped answering during the commit, which may
even land later; so it may if an exception comes out of a signal handler, which can be any:

* ``publish``: the message may be stored. Publishing it again in this process first finds out (``publish.py``).
* ``claim``: messages may be leased to the session without the caller knowing them. ``recover`` releases them, and what
  the claim would still lease; the owner of the session calls it soon (``process/membership.py``).
* ``ack``, ``release``, ``reject``: call again with the same leases; what has happened stays as it is.
* all others: call again.
"""

from __future__ import annotations

from kombu_fdb.engine import topology
from kombu_fdb.engine.dead_letters import DeadLetters
from kombu_fdb.engine.facade.inspection import Inspection
from kombu_fdb.engine.facade.messages import Messages
from kombu_fdb.engine.facade.metrics import Metrics
from kombu_fdb.engine.facade.queues import Queues
from kombu_fdb.engine.facade.sessions import Sessions
from kombu_fdb.engine.facade.upkeep import Upkeep
from kombu_fdb.engine.messages.publish import Publisher
from kombu_fdb.engine.migration import Migration
from kombu_fdb.engine.stored.work import Policy
from kombu_fdb.engine.transactions import Environment, Timeouts, Transactions
from kombu_fdb.store.protocol import Database


class Engine:
    """All verbs, by what they are about.

    Raises ``StoreUnavailable`` from every method when its deadline passes.
    """

    def __init__(
        self,
        database: Database,
        namespace: str,
        environment: Environment,
        policy: Policy | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.transactions = run = Transactions(database, namespace, environment, policy, timeouts)
        self.keys = run.keys
        self.writers_take_turns = run.writers_take_turns
        self.inspect = Inspection(run)
        self.publisher = Publisher(run)
        self.messages = Messages(run, self.inspect)
        self.queues = Queues(run)
        self.sessions = Sessions(run, self.queues)
        self.dead_letters = DeadLetters(run)
        self.metrics = Metrics(run, self.inspect)
        self.upkeep = Upkeep(run, self.inspect)
        self.migrate = Migration(run)

    def check_format(self) -> None:
        """Raises ``FormatError`` if a newer version wrote this store; marks an empty one."""
        self.transactions.write(topology.check_format)
