"""Addresses that commands listen at."""

from __future__ import annotations

from ipaddress import ip_address

__all__ = ["is_loopback"]


def is_loopback(address: str) -> bool:
    """Whether only the users of this machine can connect."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
