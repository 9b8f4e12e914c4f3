"""docs/results.md says what the code does; its table of keys is one of ``tests/test_docs.py``."""

import re
from pathlib import Path

from celery import _state
from celery.app.trace import build_tracer

from celery_fdb.results import backend, chords, records, store

PAGE = Path(__file__).parents[3] / "docs" / "results.md"


def test_the_numbers_are_those_of_the_code():
    text = PAGE.read_text()
    assert f"over {records.INLINE_BYTES:,} bytes" in text
    assert f"in parts of {store.SWEEP_ROWS}" in text
    assert f"after {chords.CLAIM_MS // 1000} s, then less often, each ten minutes" in text
    assert chords.LONGEST_LOOK_MS == 600_000
    assert f"each {backend.INTERVAL_S:.0f} s" in text


def test_the_code_runs(tmp_path):
    """In the order of the page; a worker runs where it says so."""
    before = _state.get_current_app()
    names = {"url": f"fdb+sqlite:///{tmp_path}/broker.db"}
    names["run_worker"] = lambda: work_off(names["app"])
    try:
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(compile(block, PAGE.name, "exec"), names)
    finally:
        _state._set_current_app(before)
        names["app"].backend.client.detach(names["app"].backend)
        names["app"].pool.force_close_all()
        names["app"].close()


def work_off(app):
    """Run what is in the queue, and what it leads to."""
    with app.connection_for_read() as connection:
        while (message := connection.default_channel.basic_get("celery", no_ack=True)) is not None:
            args, kwargs, embed = message.decode()
            task = app.tasks[message.headers["task"]]
            fields = {**message.headers, **embed, "args": args, "kwargs": kwargs, "is_eager": False}
            build_tracer(task.name, task, app=app)(
                message.headers["id"], args, kwargs, {**fields, "delivery_info": {}, "hostname": "w@h"}
            )
