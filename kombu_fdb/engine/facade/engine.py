"""The only door to the queue: opens transactions and runs the verbs in them.

One engine serves one namespace of one store in one process. It holds no thread and no connection to Celery; it is told
the time, and every method may be called from any thread.

What a caller must know about failure (``store/retry.py``): every method either happened entirely, or raised and did not
happen, with one exception. If it raises ``CommitUnknown``, the store stopped answering during the commit, which may
even land later; so it may if an exception comes out of a signal handler, which can be any:

* ``publish``: the message may be stored. Publishing it again in this process first finds out (``again.py``).
* ``claim``: messages may be leased to the session without the caller knowing them. ``recover`` releases them, and what
  the claim would still lease; the owner of the session calls it soon (``process/membership.py``).
* ``ack``, ``release``, ``reject``: call again with the same leases; what has happened stays as it is.
* all others: call again.
"""

from __future__ import annotations

from kombu_fdb.engine.facade.transactions import Environment, Timeouts
from kombu_fdb.engine.facade.upkeep import Upkeep
from kombu_fdb.engine.stored.policy import Policy

__all__ = ["Engine", "Environment", "Policy", "Timeouts"]


class Engine(Upkeep):
    """All verbs: see the modules they stand in, from :mod:`~kombu_fdb.engine.facade.transactions` on.

    Raises ``StoreUnavailable`` from every method when its deadline passes.
    """
