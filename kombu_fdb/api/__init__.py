"""The broker without Kombu, one class a file: ``broker``, ``queue``, ``job``, ``dead_letters``, ``consumer``.

Behind them ``connection`` (what is open, and what is held) and ``taking`` (how a job is waited for). For operators who
look after a broker: ``administration``. :mod:`kombu_fdb.aio` is the same for asyncio.
"""
