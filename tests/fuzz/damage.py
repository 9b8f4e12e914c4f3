"""What may happen to a row of a store."""

import json
from contextlib import contextmanager

ODD = [None, -1, 0, 2**63, 10**400, float("inf"), float("nan"), "", "\ud800", "q", [], {}, True, [[]], {"a": {}}]
#: Bytes that mean something in a key: text, bytes, numbers of 0 to 9 bytes, a stamp, an end.
ALPHABET = b"\x00\x01\x02\x14\x15\x1c\x1d\x33\xff\x80A"


def damaged(rng, row, prefix):
    """The row with something else in its key (behind the prefix and the tag), or its value, or both."""
    key, value = row
    tag = key.find(b"\x00", len(prefix)) + 1
    which = rng.randrange(3)
    if which != 0:
        key = key[:tag] + _scrambled(rng, key[tag:])
    if which != 1:
        value = rng.choice((_scrambled, _other_json))(rng, value)
    return key, value


@contextmanager
def telling(changes):
    """An error tells which rows were damaged, and how."""
    try:
        yield
    except Exception as error:
        for (key, value), (other_key, other) in changes:
            error.add_note(f"{key!r}: {value[:200]!r}\n-> {other_key!r}: {other[:200]!r}")
        raise


def _scrambled(rng, text):
    found = bytearray(text)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(found))
        length = rng.choice((0, 0, 1, 2, 5, 100))
        found[at : at + length] = bytes(rng.choices(ALPHABET, k=rng.choice((0, 1, 1, 2, 9, 13))))
    return bytes(found)


def _other_json(rng, value):
    """With one odd value in it, if it is JSON."""
    begin = next((at for at, byte in enumerate(value) if byte in b"[{"), None)
    if begin is None:
        return rng.choice((b"", b"\xff" * rng.randint(1, 40), bytes(rng.randint(1, 40))))
    try:
        found, end = json.JSONDecoder().raw_decode(value[begin:].decode(errors="replace"))
    except ValueError:
        return _scrambled(rng, value)
    if names := [*(range(len(found)) if isinstance(found, list) else [*found, "unheard of"])]:
        found[rng.choice(names)] = rng.choice(ODD)
    else:
        found = rng.choice(ODD)
    return value[:begin] + json.dumps(found).encode() + value[begin + end :]
