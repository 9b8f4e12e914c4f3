"""Addresses that commands listen at."""

from __future__ import annotations

from celery_fdb.cli.terminal import Refused


def cannot_listen(address: str, port: int, error: OSError) -> Refused:
    return Refused(
        "can't listen on this address",
        address=address,
        port=port,
        reason=error.strerror,
        fix="Choose another --port.",
    )
