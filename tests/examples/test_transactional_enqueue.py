import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.foundationdb
def test_the_order_and_its_task_are_stored_or_neither(cluster):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "transactional_enqueue.py", cluster.cluster_file],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["order 2: not paid", "1 order and 1 task are stored"]
