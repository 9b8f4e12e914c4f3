"""The keys are FoundationDB tuples: equal to the binding's own encoding, and in its order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kombu_fdb.errors import FormatError
from kombu_fdb.keyspace.layout import pack, pack_stamp, range_of, unpack

elements = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])), st.binary(), st.integers(min_value=0, max_value=2**64 - 2)
)
tuples = st.lists(elements, max_size=5).map(tuple)


@given(tuples)
def test_what_is_packed_is_unpacked(value):
    assert unpack(pack(*value)) == value


@given(tuples)
def test_equal_to_the_binding(value):
    import fdb.tuple

    assert pack(*value) == fdb.tuple.pack(value)


@given(st.binary(min_size=10, max_size=10), st.integers(0, 0xFFFF))
def test_stamps_are_equal_to_the_binding(version, user_version):
    import fdb.tuple

    packed = pack("ready", "q") + pack_stamp(version + user_version.to_bytes(2, "big"))
    tag, queue, stamp = fdb.tuple.unpack(packed)  # packing one needs libfdb_c
    assert (tag, queue, stamp.tr_version, stamp.user_version) == ("ready", "q", version, user_version)
    assert unpack(packed) == ("ready", "q", version + user_version.to_bytes(2, "big"))


@given(tuples, elements)
def test_a_range_holds_exactly_the_extensions(value, more):
    begin, end = range_of(pack(*value))
    assert begin <= pack(*value, more) < end
    assert not begin <= pack(*value) < end


@given(st.lists(st.integers(0, 2**64 - 2)))
def test_numbers_sort_as_numbers(numbers):
    assert sorted(numbers, key=pack) == sorted(numbers)


@pytest.mark.parametrize("garbage", [b"\x01unterminated", b"\x02a\x00\xff", b"\x33short", b"\x99", b"\x0c\x01"])
def test_foreign_bytes_are_an_error(garbage):
    with pytest.raises(FormatError):
        unpack(garbage)
