"""The result backend: ``result_backend = "fdb://..."`` or ``"fdb+sqlite:////path/b.db"``. See ``docs/results.md``."""

from celery_fdb.results.backend import FdbBackend, ResultTooLarge

__all__ = ["FdbBackend", "ResultTooLarge"]
