"""docs/results.md: its code runs. Its tables and numbers: ``tests/test_docs.py``."""

import re
from pathlib import Path

from celery import _state
from celery.app.trace import build_tracer

PAGE = Path(__file__).parents[3] / "docs" / "results.md"


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
