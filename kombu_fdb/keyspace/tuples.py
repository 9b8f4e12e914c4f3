"""The part of FoundationDB's tuple encoding that our keys use, so that every FoundationDB tool can read them.

Specification: https://github.com/apple/foundationdb/blob/main/design/tuple.md. Written here, and not taken from the
binding, because the embedded store must work without ``libfdb_c`` and because prefixes are joined with fixed suffixes
on the hot path. A test holds it equal to ``fdb.tuple``.

Elements: ``str``, ``bytes``, non-negative ``int`` below 2**64 - 1 (the binding writes larger ones another way). A
versionstamp is 12 bytes (10 assigned at commit, 2 chosen by the writer) behind :data:`STAMP_CODE`. Any other value is a
``FormatError`` when it is packed: what can be packed can be unpacked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kombu_fdb.errors import FormatError, InvalidArgument

Element = str | bytes | int

BYTES_CODE = b"\x01"
TEXT_CODE = b"\x02"
INT_ZERO = 0x14
STAMP_CODE = b"\x33"
#: From here on FoundationDB's binding writes another form.
_NO_INT = 2**64 - 1
#: Length of a packed versionstamp without its code.
STAMP_LENGTH = 12


def pack(*elements: Element) -> bytes:
    """Encode so that byte order is tuple order."""
    return b"".join([_pack_element(element) for element in elements])


def _pack_element(element: Element) -> bytes:
    if isinstance(element, int):
        return pack_int(element)
    if isinstance(element, str):
        return pack_text(element)
    if not isinstance(element, bytes | bytearray):
        raise _no_text(element)
    return BYTES_CODE + element.replace(b"\x00", b"\x00\xff") + b"\x00"


def pack_text(text: str) -> bytes:
    """As :func:`pack`, for a single text."""
    if not isinstance(text, str):
        raise _no_text(text)
    return _pack_text(text)


def pack_fresh(text: str) -> bytes:
    """As :func:`pack_text`, for a text that is unlikely to come again: a task's id."""
    if not isinstance(text, str):
        raise _no_text(text)
    try:
        return b"\x02%b\x00" % text.encode().replace(b"\x00", b"\x00\xff")
    except UnicodeEncodeError as error:
        raise FormatError(
            "a string that can't be encoded as UTF-8 can't be in a key", given=ascii(text)[:80]
        ) from error


#: Names of queues and keys come again and again.
_pack_text = lru_cache(4096)(pack_fresh)


def _no_text(element: object) -> InvalidArgument:
    return InvalidArgument("a name is a text", given=ascii(element)[:80])


def pack_int(number: int) -> bytes:
    """A non-negative integer below 2**64 - 1: its length is in the code, so shorter ones sort first."""
    if not 0 <= number < _NO_INT:
        raise FormatError("a number that can't be in a key", bits=number.bit_length(), negative=number < 0)
    length = (number.bit_length() + 7) // 8
    return bytes((INT_ZERO + length,)) + number.to_bytes(length, "big")


def pack_stamp(stamp: bytes) -> bytes:
    """A complete 12-byte versionstamp."""
    return STAMP_CODE + stamp


def range_of(prefix: bytes) -> tuple[bytes, bytes]:
    """The keys that extend ``prefix`` by at least one element."""
    return prefix + b"\x00", prefix + b"\xff"


def unpack(packed: bytes) -> tuple[Element, ...]:
    """Decode; a versionstamp comes back as its 12 bytes. Raises ``FormatError`` on anything we never write."""
    elements: list[Element] = []
    position = 0
    while position < len(packed):
        element, position = _unpack_element(packed, position)
        elements.append(element)
    return tuple(elements)


def unpack_as(packed: bytes, *types: type) -> tuple[Any, ...]:
    """Decode elements of exactly these types (of a versionstamp: bytes). Raises ``FormatError``."""
    elements = unpack(packed)
    if [type(each) for each in elements] != [*types]:
        raise FormatError("unreadable key", key=packed[:200])
    return elements


def _unpack_element(packed: bytes, position: int) -> tuple[Element, int]:
    code = packed[position]
    if code in (BYTES_CODE[0], TEXT_CODE[0]):
        raw, end = _unescape(packed, position + 1)
        return (_text(raw) if code == TEXT_CODE[0] else raw), end
    if INT_ZERO <= code <= INT_ZERO + 8 and position + code - INT_ZERO < len(packed):
        end = position + 1 + code - INT_ZERO
        return int.from_bytes(packed[position + 1 : end], "big"), end
    if code == STAMP_CODE[0] and position + STAMP_LENGTH < len(packed):
        end = position + 1 + STAMP_LENGTH
        return packed[position + 1 : end], end
    raise FormatError("unreadable key", key=packed)


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError("unreadable key", key=raw) from error


def _unescape(packed: bytes, start: int) -> tuple[bytes, int]:
    end = packed.find(b"\x00", start)
    while end != -1 and packed[end + 1 : end + 2] == b"\xff":
        end = packed.find(b"\x00", end + 2)
    if end == -1:
        raise FormatError("unreadable key", key=packed)
    return packed[start:end].replace(b"\x00\xff", b"\x00"), end + 1
