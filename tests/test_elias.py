"""The papers' code: what is counted is the length of what is written, and what is written can be read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcfed.compressors import elias
from hpcfed.compressors.blocks import BlockLayout
from hpcfed.compressors.qsgd import Qsgd


def stream(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def blocks_of(message):
    """Norm and levels of each block, by the layout's shape."""
    layout = message.layout
    groups = message.levels.reshape(layout.outer, layout.length, layout.inner)
    return list(zip(message.norms, groups.swapaxes(1, 2).reshape(layout.num_blocks, layout.length), strict=True))


class TestOmega:
    def test_known_words(self):
        """Elias 1975; also the worked examples of public tables of the omega code."""
        words = ["0", "100", "110", "101000", "101010", "101100", "101110", "1110000"]
        assert [elias.encode([value]) for value in range(1, 9)] == words
        assert elias.encode([16]) == "10100100000"
        assert elias.encode([100]) == "1011011001000"

    def test_known_lengths(self):
        expected = [1, 3, 3, 6, 6, 6, 6] + [7] * 8 + [11] * 16
        table = elias.lengths(5001)
        assert table[1:32].tolist() == expected
        assert (table[1000], table[5000]) == (17, 20)

    @pytest.mark.parametrize("limit", [2, 3, 4, 5, 3000])
    def test_the_table_gives_the_lengths_of_the_words(self, limit):
        table = elias.lengths(limit)
        assert table.tolist() == [0] + [len(elias.encode([value])) for value in range(1, limit)]

    def test_round_trip(self):
        values = list(range(1, 3000))
        assert elias.decode(elias.encode(values)) == values

    @given(st.lists(st.integers(1, 2**40)))
    def test_round_trip_of_any_list(self, values):
        assert elias.decode(elias.encode(values)) == values

    def test_zero_has_no_word(self):
        with pytest.raises(ValueError, match="starts at 1"):
            elias.encode([3, 0])


class TestBlockFormats:
    @given(
        st.lists(st.integers(-40, 40) | st.just(0), min_size=1, max_size=60),
        st.sampled_from(elias.FORMATS),
        st.floats(0, 2.0**100, width=32),
    )
    @settings(deadline=None)
    def test_what_is_written_is_read_and_has_the_counted_length(self, levels, form, norm):
        levels = np.array(levels, np.int8)
        bits = elias.encode_block(norm, levels, 40, form)
        read_norm, read_levels = elias.decode_block(bits, levels.size, 40)
        assert read_norm == norm
        np.testing.assert_array_equal(read_levels, levels)
        counted = elias.count_bits(levels, BlockLayout.of(levels.shape, "all"), 40)
        assert len(bits) == counted[0, elias.FORMATS.index(form)]

    def test_distances_beyond_the_table_are_counted(self):
        for place in (4094, 4095, 4096, 65_535, 70_000, 1_100_000):
            levels = np.zeros(place + 1, np.int16)
            levels[place] = -3
            counted = elias.count_bits(levels, BlockLayout.of(levels.shape, "all"), 1000)[0, 0]
            assert counted == 32 + 2 + len(elias.encode([place + 1, 3])) + 1

    @pytest.mark.parametrize("block", ["slice", "all", "15"])
    @pytest.mark.parametrize("num_levels", [1, 4, 200, 40_000])
    def test_the_papers_bits_are_the_length_of_the_message(self, num_levels, block):
        array = stream(num_levels).standard_normal((2, 6, 5, 3)).astype(np.float32)
        array[0, :, :, 1] = 0
        message = Qsgd(num_levels, block).encode(array, stream(1))
        written = [
            min((elias.encode_block(norm, levels, num_levels, form) for form in elias.FORMATS), key=len)
            for norm, levels in blocks_of(message)
        ]
        assert message.paper_bits == sum(map(len, written))
        assert sum(message.paper_formats.values()) == message.layout.num_blocks
        for bits, (norm, levels) in zip(written, blocks_of(message), strict=True):
            read_norm, read_levels = elias.decode_block(bits, levels.size, num_levels)
            assert read_norm == norm
            np.testing.assert_array_equal(read_levels, levels)

    def test_the_last_block_may_be_shorter(self):
        message = Qsgd(20, "16").encode(stream().standard_normal(40), stream(1))
        cuts = np.split(message.levels, [16, 32])
        expected = sum(
            min(len(elias.encode_block(norm, levels, 20, form)) for form in elias.FORMATS)
            for norm, levels in zip(message.norms, cuts, strict=True)
        )
        assert message.paper_bits == expected

    @pytest.mark.parametrize(
        ("rest", "num_levels", "form"), [(0.0, 1000, "sparse"), (2.0, 1000, "dense"), (900.0, 1000, "fixed")]
    )
    def test_each_format_is_chosen_where_it_is_the_shortest(self, rest, num_levels, form):
        # Beside one large entry: nothing; small levels that are not zero; levels near s.
        array = np.full(12, rest)
        array[0] = 1000.0
        message = Qsgd(num_levels).encode(array, stream())
        assert message.paper_formats == {each: int(each == form) for each in elias.FORMATS}

    @pytest.mark.parametrize(
        ("num_levels", "expected"),
        [(20, (0.60, 1.19, 6)), (500, (3.9, 4.0, 10)), (1000, (5.5, 5.4, 11)), (5000, (10.0, 9.3, 14))],
    )
    def test_bits_a_coordinate_of_a_gaussian_slice(self, num_levels, expected):
        """Averages over Gaussian vectors of 65536 elements, from an independent implementation, to the digits given."""
        array = stream().standard_normal(65536)
        message = Qsgd(num_levels).encode(array, stream(1))
        counted = elias.count_bits(message.levels, message.layout, num_levels)[0] / 65536
        np.testing.assert_allclose(counted, expected, rtol=0.02)
