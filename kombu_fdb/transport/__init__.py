"""The kombu transport."""

from kombu_fdb.transport.transport import Transport

__all__ = ["Transport"]
