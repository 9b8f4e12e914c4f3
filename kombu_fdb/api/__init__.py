"""The broker without Kombu: ``broker`` (with what operators need), ``queue``, ``job``, ``dead_letters``, ``consumer``.

Behind them ``connection`` (what is open, and what is held) and ``arguments`` (which several verbs share).
:mod:`kombu_fdb.aio` is the same for asyncio.
"""
