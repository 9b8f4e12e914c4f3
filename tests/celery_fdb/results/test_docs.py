"""docs/results.md says what the code does. To write its table anew: python tests/celery_fdb/results/test_docs.py."""

import re
from pathlib import Path

import pytest
from celery import _state
from celery.app.trace import build_tracer

from celery_fdb.results import backend, chords, records, store

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results.md"
TABLE = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- /keys -->)", re.DOTALL)


def rendered_keys():
    """The reStructuredText table of ``layout.py`` in Markdown."""
    _, heading, rows, _ = re.split(r"^=+ +=+ +=+\n", records.__doc__, flags=re.MULTILINE)
    cells = [re.split(r"\s{2,}", line.strip()) for line in (heading, "---  ---  ---", *rows.splitlines())]
    assert all(len(row) == 3 for row in cells)
    return "".join(f"| {' | '.join(row)} |\n" for row in cells).replace("``", "`")


def test_the_keys_are_those_of_the_code():
    assert TABLE.search(PAGE.read_text())[0] == rendered_keys(), "run: python tests/celery_fdb/results/test_docs.py"


@pytest.mark.parametrize("tag", ["CHORD-ONCE", "CHORD-SURE"])
def test_a_guarantee_is_explained_upheld_and_tested(tag):
    assert f"| `{tag}` |" in PAGE.read_text()
    assert tag in Path(chords.__file__).read_text()
    assert any(tag in path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))


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


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: rendered_keys(), PAGE.read_text()))
