"""Guessing the token is slowed down, and the rightful user is not kept out by it.

Model. Each address has :data:`FREE` attempts, and one more every :data:`AGAIN_S` seconds. One beyond that is refused
without being looked at, and does not prolong the wait. Who has logged in in this browser before (a cookie says so,
``login.py``) has attempts of their own: no one behind the same proxy uses them up. Who logs in has all of them again.

:data:`MOST` addresses are remembered, in each process; the one that was heard of longest ago makes room, and has all
its attempts again. So an attacker with very many addresses is not slowed down: what keeps the dashboard shut is the
length of the token.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from ipaddress import IPv6Address, IPv6Network, ip_address
from threading import Lock

from kombu_fdb.primitives.clock import Clock

FREE, AGAIN_S = 10, 5.0
MOST = 1_000
#: What one subscriber has.
IPV6_PREFIX = 64


class Attempts:
    """Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        #: When each will have all its attempts again (a token bucket, as GCRA keeps it).
        self._full_s: OrderedDict[str, float] = OrderedDict()

    def take(self, who: str) -> float:
        """0, and one attempt less; or how many seconds it is until there is one."""
        with self._lock:
            now_s = self._clock.monotonic()
            full_s = max(self._full_s.get(who, now_s), now_s) + AGAIN_S
            wait_s = full_s - now_s - FREE * AGAIN_S
            if wait_s > 0:
                return wait_s
            self._full_s[who] = full_s
            self._full_s.move_to_end(who)
            if len(self._full_s) > MOST:
                self._full_s.popitem(last=False)
            return 0.0

    def forget(self, who: str) -> None:
        """They have logged in."""
        with self._lock:
            self._full_s.pop(who, None)


def address_of(host: str) -> str:
    """Of IPv6 the network, as a subscriber has a whole one."""
    try:
        found = ip_address(host)
    except ValueError:
        return host[:100]
    if isinstance(found, IPv6Address):
        return str(found.ipv4_mapped or IPv6Network((found, IPV6_PREFIX), strict=False))
    return str(found)


def browser_of(cookie: str) -> str:
    """By the cookie of one that has logged in before."""
    return f"browser {hashlib.sha256(cookie.encode(errors='replace')).hexdigest()}"
