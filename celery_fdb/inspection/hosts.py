"""By which names a page, or the metrics, may be asked for.

The check is against DNS rebinding: a page of another site whose name was made to lead to this machine is refused, since
the browser still sends that site's name. An IP address is always ours: only a name can be made to lead elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address

#: How a browser on this machine calls it.
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def is_ours(host: str, names: Collection[str]) -> bool:
    """Of the header ``Host``. ``names``: without ports, in small letters."""
    head, _, port = host.lower().rpartition(":")
    name = head if head and port.isdigit() else host.lower()
    return name in names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether only the users of this machine can connect to what listens there."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
