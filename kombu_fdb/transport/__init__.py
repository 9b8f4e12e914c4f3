"""The kombu transport."""

from kombu_fdb.transport.publishing.kombu_versions import BatchPublishError, batched
from kombu_fdb.transport.transport import Transport

__all__ = ["BatchPublishError", "Transport", "batched"]
