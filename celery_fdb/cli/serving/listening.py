"""Addresses that commands listen at."""

from __future__ import annotations

from ipaddress import ip_address

from celery_fdb.cli.terminal import Refused

__all__ = ["cannot_listen", "is_loopback"]


def cannot_listen(address: str, port: int, error: OSError) -> Refused:
    return Refused(
        "can't listen on this address",
        address=address,
        port=port,
        reason=error.strerror,
        fix="Choose another --port.",
    )


def is_loopback(address: str) -> bool:
    """Whether only the users of this machine can connect."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
