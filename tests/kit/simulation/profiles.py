"""The profiles: what each kind of weather consists of. A new one is found by ``make sim`` by itself."""

from __future__ import annotations

from collections.abc import Mapping

from kit.faults import Fault
from kit.simulation.plan import Profile

LIFE = {"publish": 32, "claim": 32, "ack": 16, "release": 6, "reject": 3, "duties": 14, "beat": 3, "pass": 14}
STORMS = {"die": 2, "close": 1, "freeze": 2, "jump": 1, "outage": 1, "recovery": 1, "cut": 1, "start": 1}
CONTROL = {"limit": 3, "pause": 1, "purge": 1, "delete": 2, "replay": 1, "wait": 3, "calm": 1, "garble": 1} | {
    "cancel": 2,
    "move": 1,
    "repeat": 2,
}

#: What a connection outlives. No thread of a receiver runs a signal handler; a lost watch waits for the safety look.
CONNECTED = {
    Fault.CONFLICT: 4,
    Fault.ANSWER_LOST_APPLIED: 4,
    Fault.ANSWER_LOST_NOT_APPLIED: 3,
    Fault.COMMIT_LATE: 2,
    Fault.TOO_OLD: 1,
    Fault.UNAVAILABLE: 3,
}

PROFILES: Mapping[str, Profile] = {
    "everything": Profile(LIFE | STORMS | CONTROL, {"plain": {}, "fair": {}, "full": {"x-max-length": 3}}),
    "claims": Profile(
        {"publish": 12, "claim": 16, "ack": 8, "release": 4, "purge": 5, "delete": 3, "pass": 2, "wait": 3},
        {"plain": {}},
        others={"claim": 8, "ack": 2, "delete": 2, "purge": 1, "publish": 1},
        meanwhile=0.6,
        delayed=0.0,
        no_ack=0.2,
    ),
    "sessions": Profile(
        {"publish": 12, "claim": 18, "ack": 8, "reject": 2, "release": 4, "duties": 8, "beat": 4, "pass": 4, "tick": 30}
        | {"die": 2, "freeze": 5, "cut": 2, "close": 3, "calm": 1},
        {"plain": {}},
        others={"duties": 4, "ack": 6, "wake": 10, "close": 8, "claim": 4, "sweep": 8},
        meanwhile=0.8,
        kill=0.06,
        delayed=0.0,
    ),
    "outages": Profile(
        {"publish": 4, "claim": 8, "ack": 2, "duties": 16, "pass": 12, "outage": 5, "recovery": 3, "beat": 2},
        {"plain": {}},
        trouble=0.3,
        delayed=0.0,
    ),
    "late": Profile(
        {
            "publish": 6,
            "insist": 8,
            "claim": 16,
            "ack": 5,
            "release": 2,
            "beat": 2,
            "pass": 10,
            "duties": 4,
            "close": 1,
        },
        {"plain": {}, "fair": {}},
        others={"claim": 4, "pass": 2, "insist": 2, "sweep": 1},
        trouble=0.4,
        at_commit={Fault.COMMIT_LATE: 6, Fault.INTERRUPTED: 2, Fault.ANSWER_LOST_APPLIED: 2, Fault.CONFLICT: 1},
        delayed=0.0,
        expiring=0.0,
    ),
    "delays": Profile(
        {"publish": 12, "claim": 8, "ack": 4, "release": 6, "promote": 10, "duties": 6, "pass": 14, "jump": 3}
        | {"die": 1, "start": 1},
        others={"promote": 6, "publish": 4, "pass": 2, "jump": 1, "claim": 2, "purge": 1},
        meanwhile=0.6,
        delayed=0.7,
    ),
    "fair": Profile(
        {"publish": 14, "claim": 14, "ack": 6, "release": 6, "pass": 2, "reject": 1, "purge": 1, "delete": 2},
        {"fair": {}},
        keys=("", "k", "t/1", "t/2"),
        others={"claim": 8, "release": 5, "publish": 3, "ack": 2, "purge": 1},
        meanwhile=0.8,
        delayed=0.0,
        urgent=0.3,
    ),
    "limits": Profile(
        {"publish": 14, "claim": 20, "ack": 10, "release": 4, "limit": 5, "pause": 1, "pass": 2, "duties": 2, "die": 1},
        {"fair": {}},
        keys=("", "k"),
        others={"claim": 10, "ack": 6, "limit": 2, "release": 2, "publish": 6},
        meanwhile=0.8,
        delayed=0.0,
        urgent=0.5,
    ),
    "one key": Profile(
        {"publish": 20, "claim": 24, "ack": 12, "limit": 8},
        {"fair": {}},
        keys=("k",),
        others={"publish": 6, "claim": 10, "ack": 2},
        meanwhile=0.9,
        trouble=0.0,
        kill=0.0,
        delayed=0.0,
        expiring=0.0,
        urgent=0.5,
    ),
    "pauses": Profile(
        {"publish": 16, "claim": 20, "ack": 6, "limit": 2, "pause": 6, "release": 2},
        {"plain": {}, "fair": {}},
        keys=("", "k"),
        others={"limit": 3, "pause": 5, "claim": 1},
        steps=60,
        meanwhile=0.7,
        delayed=0.0,
    ),
    "turns": Profile(
        {"publish": 30, "claim": 16, "ack": 10, "release": 1},
        {"fair": {}},
        keys=("", "k", "l", "m", "n"),
        others={"publish": 8, "release": 1, "claim": 4},
        trouble=0.0,
        delayed=0.0,
        expiring=0.0,
        urgent=0.0,
        exact=True,
    ),
    "poison": Profile(
        {"publish": 16, "claim": 24, "release": 18, "reject": 4, "garble": 3, "duties": 8, "pass": 10, "die": 3}
        | {"replay": 3, "ack": 2, "calm": 2},
        {"plain": {}, "fair": {}, "graves": {}, "cellar": {}}
        | {"mortal": {"x-dead-letter-exchange": "dlx", "x-delivery-limit": 2, "x-message-ttl": 60_000}},
        delivery_limit=3,
        kill=0.06,
        delayed=0.1,
        expiring=0.3,
    ),
    "full": Profile(
        {"publish": 20, "claim": 10, "ack": 6, "release": 4, "reject": 4, "pass": 4, "replay": 2, "duties": 2},
        {
            "head": {"x-max-length": 3},
            "head-dlx": {"x-max-length": 2, "x-dead-letter-exchange": "dlx"},
            "refuse": {"x-max-length": 3, "x-overflow": "reject-publish"},
            "refuse-dlx": {"x-max-length": 3, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "dlx"},
            "fair-head": {"x-max-length": 4},
            "bytes": {"x-max-length-bytes": 40},
            "graves": {},
            "cellar": {},
        },
        delayed=0.1,
    ),
    "vanishing": Profile(
        {"publish": 10, "claim": 8, "ack": 6, "consume": 4, "leave": 8, "tick": 40, "die": 1, "drop": 2} | {"calm": 1},
        {"brief": {"x-expires": 8_000}, "plain": {}, "fair-brief": {"x-expires": 12_000}},
        others={"consume": 8, "publish": 6, "duties": 2, "leave": 1},
        meanwhile=0.7,
        delayed=0.2,
    ),
    "tasks": Profile(
        {"publish": 14, "claim": 10, "ack": 5, "release": 6, "reject": 5, "cancel": 10, "promote": 3, "duties": 4}
        | {"pass": 4, "move": 4, "walk": 2, "purge": 1, "die": 1},
        others={"cancel": 5, "promote": 3, "release": 4, "move": 4, "claim": 4, "publish": 2, "walk": 1},
        meanwhile=0.7,
        delayed=0.4,
    ),
    "repeats": Profile(
        {"repeat": 40, "tidy": 14, "pass": 20, "claim": 6, "ack": 4, "purge": 2},
        {"plain": {}},
        others={"repeat": 10, "tidy": 2, "pass": 2},
        meanwhile=0.7,
        trouble=0.3,
        delayed=0.2,
        expiring=0.0,
    ),
    "letters": Profile(
        {"publish": 12, "claim": 14, "reject": 16, "walk": 10, "discard": 3, "replay": 2, "ack": 1, "cancel": 1}
        | {"pass": 2, "duties": 2},
        others={"walk": 8, "discard": 3, "claim": 4, "reject": 3, "replay": 2},
        meanwhile=0.8,
        kill=0.08,
        delayed=0.0,
        expiring=0.05,
    ),
    "single": Profile(
        {"publish": 14, "claim": 30, "ack": 8, "release": 3, "resign": 10, "pass": 2, "tick": 10, "die": 1, "close": 12}
        | {"freeze": 2, "cut": 1, "wait": 2, "pause": 2, "duties": 2, "sweep": 6},
        {"single": {"x-single-active-consumer": True}},
        others={"claim": 14, "resign": 3, "wake": 2, "sweep": 10, "close": 8, "duties": 1, "publish": 1},
        meanwhile=0.9,
        kill=0.05,
        delayed=0.0,
        expiring=0.0,
    ),
    "stops": Profile(
        {
            "publish": 12,
            "insist": 3,
            "claim": 18,
            "ack": 10,
            "reject": 2,
            "release": 4,
            "duties": 6,
            "pass": 4,
            "tick": 6,
        }
        | {"shut": 6, "die": 1, "calm": 1},
        {"plain": {}, "fair": {}},
        others={"claim": 8, "duties": 6, "ack": 4, "publish": 3, "wake": 2, "pass": 2, "sweep": 2, "shut": 1},
        meanwhile=0.6,
        stopped=0.2,
        delayed=0.0,
        expiring=0.0,
    ),
    "interrupts": Profile(
        {"publish": 12, "insist": 6, "repeat": 4, "claim": 20, "ack": 8, "reject": 3, "release": 5, "duties": 8}
        | {"pass": 4, "beat": 2, "shut": 3, "wait": 2, "purge": 1, "cancel": 1, "limit": 2},
        interrupted=0.35,
        at_commit={Fault.INTERRUPTED: 6, Fault.ANSWER_LOST_APPLIED: 1, Fault.CONFLICT: 2},
        expiring=0.0,
    ),
    "clocks": Profile(
        {"publish": 14, "repeat": 14, "claim": 14, "ack": 4, "release": 5, "promote": 6, "tidy": 6, "duties": 6}
        | {"pass": 16, "jump": 10, "die": 1},
        {"plain": {}, "short": {"x-message-ttl": 15_000}},
        others={"publish": 3, "repeat": 6, "promote": 4, "claim": 4, "pass": 3, "jump": 2, "tidy": 2},
        delayed=0.3,
        expiring=0.5,
        jumps=(-20, -5, 5, 20),
        most_off_s=60,
    ),
    "rates": Profile(
        {"publish": 22, "claim": 26, "ack": 8, "release": 4, "limit": 3, "pass": 16, "jump": 6, "duties": 6, "tick": 6}
        | {"calm": 1, "die": 1},
        {"fair": {}},
        keys=("k", "l"),
        others={"claim": 8, "publish": 4, "pass": 3, "jump": 2, "duties": 2},
        delayed=0.0,
        expiring=0.0,
        urgent=0.0,
        jumps=(-10, -3, 3, 10),
        most_off_s=10,
        rates=((0.5, 6), (0.2, 4), (0.05, 2)),
    ),
    "waits": Profile(
        {"publish": 10, "claim": 16, "ack": 8, "limit": 4, "pass": 6, "jump": 10, "duties": 6, "calm": 3},
        {"fair": {}},
        keys=("k",),
        steps=60,
        trouble=0.0,
        kill=0.0,
        delayed=0.0,
        expiring=0.0,
        urgent=0.0,
        jumps=(-60, 60),
        most_off_s=60,
        rates=((0.05, 1), (0.1, 1)),
    ),
    "turns of duties": Profile(
        {"publish": 18, "claim": 10, "ack": 4, "reject": 6, "release": 3, "duties": 12, "pass": 10, "repeat": 4}
        | {"die": 3, "freeze": 2, "limit": 2, "calm": 1},
        {"plain": {}, "fair": {}, "full": {"x-max-length": 3}, "brief": {"x-expires": 8_000}},
        others={"publish": 6, "duties": 4, "claim": 2, "pass": 1},
        delayed=0.5,
        expiring=0.3,
        turn=1,
    ),
    "connections": Profile(
        {"publish": 8, "turn": 40, "drain": 20, "finish": 24, "hush": 3, "listen": 4, "duties": 2, "pass": 14}
        | {"tick": 3, "die": 1, "freeze": 1, "wake": 2, "cut": 1, "calm": 1, "delete": 1, "promote": 1},
        {"plain": {}, "other": {}, "fair": {}},
        others={"publish": 12, "turn": 4, "drain": 8, "finish": 14, "hush": 2, "listen": 1, "duties": 1},
        slots=2,
        meanwhile=0.8,
        delayed=0.1,
        expiring=0.0,
        at_commit=CONNECTED,
        connected=True,
    ),
    "fenced": Profile(
        {"publish": 18, "turn": 40, "drain": 20, "finish": 30, "hush": 2, "listen": 3, "tick": 24, "die": 1}
        | {"freeze": 6, "cut": 1, "calm": 1},
        {"plain": {}, "fair": {}},
        others={"publish": 8, "turn": 8, "drain": 6, "finish": 8, "duties": 2, "wake": 1},
        steps=200,
        delayed=0.0,
        expiring=0.0,
        at_commit=CONNECTED,
        connected=True,
    ),
    "waiters": Profile(
        {"publish": 5, "turn": 60, "drain": 20, "finish": 24, "hush": 1, "listen": 3, "duties": 3, "pass": 10}
        | {"tick": 6, "die": 2, "freeze": 2, "wake": 2, "cut": 1, "calm": 1, "delete": 1}
        | {"limit": 2, "pause": 2, "jump": 2},
        {"plain": {}, "fair": {}, "other": {}},
        others={"publish": 2, "turn": 20, "drain": 4, "finish": 6, "hush": 2, "listen": 2, "duties": 2, "pass": 3},
        batches=(1, 4, 8),
        slots=5,
        steps=240,
        meanwhile=0.8,
        kill=0.05,
        struck=0.2,
        delayed=0.1,
        expiring=0.1,
        at_commit=CONNECTED,
        connected=True,
        contested=True,
        jumps=(-20, -5, 5, 20),
        most_off_s=60,
    ),
    "successors": Profile(
        {"publish": 8, "turn": 50, "drain": 20, "finish": 24, "hush": 5, "listen": 8, "duties": 4, "pass": 10}
        | {"tick": 8, "die": 3, "freeze": 3, "wake": 2, "cut": 1, "calm": 1, "delete": 1, "limit": 1},
        {"single": {"x-single-active-consumer": True}, "fair": {}, "other": {}},
        others={"publish": 2, "turn": 16, "drain": 4, "finish": 6, "hush": 3, "listen": 3, "duties": 3, "pass": 2},
        slots=3,
        steps=200,
        meanwhile=0.8,
        kill=0.05,
        delayed=0.1,
        expiring=0.1,
        at_commit=CONNECTED,
        connected=True,
    ),
    "rescheduling": Profile(
        {"publish": 14, "claim": 10, "ack": 5, "release": 4, "reschedule": 16, "duties": 6, "pass": 6, "tick": 6}
        | {"cancel": 2, "purge": 1, "move": 1, "die": 1, "start": 1},
        {"plain": {}, "fair": {}},
        others={"reschedule": 6, "claim": 6, "promote": 5, "cancel": 2, "delete": 2, "move": 1},
        meanwhile=0.5,
        delayed=0.5,
    ),
}
