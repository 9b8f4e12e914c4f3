"""The kombu transport. Importing it registers the URL schemes, even from a checkout that is not installed."""

import _kombu_fdb_autoload  # noqa: F401 - a checkout has no entry points, so kombu has not imported it
from kombu_fdb.transport.batch import BatchPublishError, batched
from kombu_fdb.transport.transport import Transport

__all__ = ["BatchPublishError", "Transport", "batched"]
