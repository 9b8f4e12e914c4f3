"""The queue engine: leases, order, delays, sessions. One verb of a message's life per file; ``engine.py`` is the door.

The verbs are plain functions of a transaction. They neither open nor commit one, so several compose into one commit;
they take time and identifiers as arguments, so a simulation can run them. What they do to the counters and whom they
wake is collected in a :class:`~kombu_fdb.queue.tally.Tally` and written once per transaction.
"""
