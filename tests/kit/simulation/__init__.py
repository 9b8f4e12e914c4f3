"""Deterministic simulation of a whole namespace: ``python -m kit.simulation FIRST [LAST]``.

From one seed a *plan* is made (``plan.py``): the steps of a few processes, what others do in the middle of them, and
what goes wrong. The plan is carried out (``world.py``, ``actions.py``) by the real engine on a
:class:`~kit.faults.FaultyDatabase`. After every commit, what it changed is held against the guarantees
of ``docs/guarantees.md`` (``ledgers``); at the end the faults stop and everything
must come to rest (``rest.py``). In some profiles the messages come through whole connections: the transport's
fetcher, dispatch, credit and QoS, and the client and session of their process (``connection.py``). A plan
that fails is shrunk to one that a person can read (``shrink.py``).

``TWINS`` (``twins.py``) are versions of the engine with one guard taken out; a simulation that does not catch them
proves nothing.
"""

from __future__ import annotations

from kit.simulation.plan import make_plan
from kit.simulation.profiles import PROFILES
from kit.simulation.run import profile_of, replay, simulate
from kit.simulation.shrink import shrink
from kit.simulation.twins import TWINS, twin
from kit.simulation.violation import Violation

__all__ = ["PROFILES", "TWINS", "Violation", "make_plan", "profile_of", "replay", "shrink", "simulate", "twin"]
