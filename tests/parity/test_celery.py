"""Celery on ours as on Redis and RabbitMQ: what each of two hundred situations of a task comes to.

``celery_recorded.json`` holds what it came to on each broker; ``python -m kit.celery_parity`` makes it. Without the
others' servers, ours is still held against what they did; with them, the recording is, too. Where ours is meant to be
different, docs/migrating.md says so.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from kit.celery_parity.brokers import PEERS, broker, came_to, missing, play
from kit.celery_parity.situations import SITUATIONS
from kit.celery_parity.stage import Events
from kit.celery_versions import since_celery

MIGRATING = Path(__file__).parents[2] / "docs" / "migrating.md"

#: The differences that docs/migrating.md lists, and which situations show them.
DIFFERENCES = {
    "waiting": (
        *("warm-delayed-*", "cold-delayed-*", "lost-delayed-*"),
        *("warm-retry_later-*", "cold-retry_later-*", "lost-retry_later-*"),
    ),
    "memory-error": (
        *("fatal-run_out_of_memory-late*", "fatal-run_out_of_memory-ignored_late"),
        *("fatal-link_error-run_out_of_memory-*", "fatal-chord-run_out_of_memory-*"),
    ),
    "expires": ("expired-*", "delayed_past_its_expiry-*", "chord_with_an_expired_member-*"),
    "nested-chords": (
        *("chord_of_chords-fail-*", "chord_of_chords_into_groups-fail-*"),
        *("chord_of_chains_into_groups-fail-*", "chord_of_chains_from_groups_into_groups-fail-*"),
    ),
    "revoke": ("revoked_while_it_waits-*",),
}

#: What a slow machine has not played (``kit.celery_parity.stage``).
WAIT = [
    each for each in SITUATIONS if each.behaviour == "retry_later" or each.call in {"delayed", "revoked_while_it_waits"}
]

Came = dict[str, dict[str, Any]]


def documented():
    table = MIGRATING.read_text().split("<!-- differences -->")[1].split("<!-- /differences -->")[0]
    return set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE))


def as_peers(ours, redis, rabbitmq):
    """As on one of them. Redis has no dead letters: those are as on RabbitMQ."""

    def dead(came):
        return {role: facts["dead"] for role, facts in came.items() if "dead" in facts}

    def rest(came):
        return {role: {name: fact for name, fact in facts.items() if name != "dead"} for role, facts in came.items()}

    return ours == rabbitmq or (rest(ours) == rest(redis) and dead(ours) == dead(rabbitmq))


@pytest.fixture(scope="module")
def differing():
    """The situations that come to something else on ours, by the difference; under "" what none explains."""
    redis, rabbitmq = came_to("redis"), came_to("rabbitmq")
    found = {}
    for name in ("sqlite", "installed"):
        for situation, ours in came_to(name).items():
            if not as_peers(ours, redis[situation], rabbitmq[situation]):
                for each in explaining(situation):
                    found.setdefault(each, set()).add(situation)
    return found


def explaining(situation):
    found = [name for name, kinds in DIFFERENCES.items() if any(fnmatchcase(situation, kind) for kind in kinds)]
    yield from found or [""]


def test_each_situation_is_recorded():
    names = [each.name for each in SITUATIONS]
    assert len(names) == len(set(names))
    assert list(came_to("redis")) == names


def test_what_differs_is_in_the_docs(differing):
    assert differing.pop("", set()) == set()
    assert differing.keys() == DIFFERENCES.keys() == documented()


@pytest.mark.parametrize("kind", [kind for kinds in DIFFERENCES.values() for kind in kinds])
def test_no_difference_is_listed_that_is_none(differing, kind):
    assert any(fnmatchcase(situation, kind) for situations in differing.values() for situation in situations)


def test_a_line_that_is_seen_in_part_is_read_with_its_rest(tmp_path):
    path = tmp_path / "events"
    events = Events(path)
    for part in ('["a-task", "r', 'uns"]\n["a', '-task", "runs"]\n'):
        with path.open("a") as file:
            file.write(part)
        events.read()
    assert events.of == {"a-task": {"runs": 2}}


#: Of Celery, for an errback of a chain with a chord in it.
quiet = pytest.mark.filterwarnings("ignore:task_allow_error_cb_on_chord_header")


@quiet
@since_celery(5, 7)
@pytest.mark.process
@pytest.mark.replay
@pytest.mark.parametrize("name", ["sqlite", "installed", *PEERS])
def test_the_situations_come_to_what_is_recorded(name, tmp_path):
    if (reason := missing(name)) is not None:
        pytest.skip(reason)
    with broker(name, tmp_path) as at:
        check(at, came_to(name))


@quiet
@since_celery(5, 7)
@pytest.mark.process
@pytest.mark.replay
@pytest.mark.foundationdb
def test_the_situations_come_to_the_same_on_a_cluster(cluster, tmp_path):
    with broker("installed", tmp_path, f"fdb://{cluster.connection_string}/parity") as at:
        check(at, came_to("installed"))


def check(at, recorded):
    played = play(at, recorded)
    differ = {name: (came, recorded[name]) for name, came in played.items() if came != recorded[name]}
    assert differ == {}, "now, and as recorded"
    assert len(played) > len(recorded) - len(WAIT)
