"""``python -m celery_fdb --broker URL COMMAND``: the command line without an app."""

from __future__ import annotations

from celery_fdb.cli import fdb

if __name__ == "__main__":
    fdb(prog_name="python -m celery_fdb")
