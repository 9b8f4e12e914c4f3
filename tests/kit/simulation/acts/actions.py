"""What a step can do, by its name in a profile; ``thread`` says which thread of a process does it.

A new verb of the engine is one function in ``owners.py`` or ``operators.py``, a line in :data:`ACTIONS`, a weight in a
profile, and its rights in ``rights.py``.
"""

from __future__ import annotations

from kit.simulation import weather
from kit.simulation.acts import closing, consuming, operators, owners
from kit.simulation.world import Action

#: Name -> (thread, what it does); the world's own actions have no thread.
ACTIONS: dict[str, tuple[str, Action]] = {
    **{
        each.__name__: ("main", each)
        for each in (
            *(
                owners.publish,
                owners.repeat,
                owners.insist,
                owners.claim,
                owners.ack,
                owners.reject,
                owners.release,
                owners.wait,
            ),
            *(owners.start, owners.die, owners.consume, owners.leave, owners.resign),
            *(operators.limit, operators.pause, operators.purge, operators.delete, operators.replay, operators.garble),
            *(operators.drop, operators.cancel, operators.move, operators.walk, operators.discard),
            operators.reschedule,
        )
    },
    **{each.__name__: ("duties", each) for each in (owners.duties, owners.sweep, owners.promote, owners.tidy)},
    **{each.__name__: ("world", each) for each in (weather.freeze, weather.cut, weather.jump)},
    **{each.__name__: ("main", each) for each in (consuming.drain, consuming.finish, consuming.listen, consuming.hush)},
    "turn": ("receiver", consuming.turn),
    "beat": ("beat", owners.beat),
    **{each.__name__: ("close", each) for each in (closing.close, closing.shut)},
    "pass": ("", weather.pass_),
    **{
        each.__name__: ("", each)
        for each in (weather.wake, weather.tick, weather.outage, weather.recovery, weather.calm)
    },
}
