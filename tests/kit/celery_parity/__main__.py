"""``python -m kit.celery_parity``: record anew what each situation comes to on each broker, or on those that are named.

Needs ``redis-server`` and ``rabbitmq-server``, and a quiet machine: what happens within the time that nothing happened
is what is recorded. Look at the difference before you commit it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from kit.celery_parity.brokers import BROKERS, RECORDED, broker, came_to, missing, play
from kit.celery_parity.situations import SITUATIONS
from kit.celery_parity.stage import Observed


def record(names: list[str]) -> None:
    observed: dict[str, dict[str, Observed]] = {}
    for name in BROKERS:
        if names and name not in names:
            observed[name] = came_to(name)
            continue
        if (reason := missing(name)) is not None:
            raise SystemExit(f"{name}: {reason}")
        with tempfile.TemporaryDirectory() as folder, broker(name, Path(folder)) as at:
            observed[name] = play(at)
    RECORDED.write_text(_shown(observed))


def _shown(observed: dict[str, dict[str, Observed]]) -> str:
    """One line for all brokers on which a situation comes to the same."""
    situations = []
    for situation in SITUATIONS:
        lines: dict[str, list[str]] = {}
        for name in BROKERS:
            lines.setdefault(json.dumps(observed[name][situation.name]), []).append(name)
        shown = ",\n".join(f'  {{"on": {json.dumps(names)}, "came_to": {line}}}' for line, names in lines.items())
        situations.append(f"{json.dumps(situation.name)}: [\n{shown}\n]")
    return "{\n" + ",\n".join(situations) + "\n}\n"


if __name__ == "__main__":
    record(sys.argv[1:])
