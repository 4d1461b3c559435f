"""Quantizers: unbiased, with the variance of the closed form, and the same values whichever way a message is cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcfed.compressors import pieces, rounding
from hpcfed.compressors.blocks import BlockLayout
from hpcfed.compressors.grid import Grid
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.compressors.raw import Raw
from hpcfed.errors import ConfigError, DataError, DivergedError, HpcfedError


def stream(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def decode(compressor, message, array, weight=1.0):
    total = np.zeros(array.size)
    segment = message.segment(0, array.size)
    compressor.accumulate(total, segment, array.shape, array.dtype, 0, array.size, weight)
    return total.reshape(array.shape)


def block_of_each_element(shape, block):
    """Block numbers from the rule's wording, with NumPy indices instead of the layout's formula."""
    size = int(np.prod(shape))
    if block == "slice" and len(shape) >= 3:
        labels = np.arange(int(np.prod(shape[:-3])) * shape[-1]).reshape(*shape[:-3], 1, 1, shape[-1])
        return np.broadcast_to(labels, shape).reshape(-1)
    if block in ("slice", "all"):
        return np.zeros(size, int)
    return np.concatenate([np.full(int(block), k) for k in range(size // int(block) + 1)])[:size]


def exact_variance(values, scale, num_levels):
    """Sum over elements of the variance of stochastic rounding to multiples of scale / s."""
    position = num_levels * np.abs(values.astype(float)) / scale
    fraction = position - np.floor(position)
    return (scale / num_levels) ** 2 * fraction * (1 - fraction)


def words_of(digits):
    return [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]


def philox(counter, key):
    """Philox4x32-10 as its authors define it (Salmon et al. 2011, section 3.3), one block."""
    for step in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        bumped = (key[0] + step * 0x9E3779B9) % 2**32, (key[1] + step * 0xBB67AE85) % 2**32
        counter = [
            right // 2**32 ^ counter[1] ^ bumped[0],
            right % 2**32,
            left // 2**32 ^ counter[3] ^ bumped[1],
            left % 2**32,
        ]
    return counter


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
BLOCKS = st.one_of(st.sampled_from(["slice", "all"]), st.integers(1, 40).map(str))
CODINGS = st.sampled_from(["fast", "fixed", "elias", "entropy", "auto"])
LEVELS = st.sampled_from([1, 2, 3, 20, 127, 128, 1000, 30000, 40000, 1 << 20])


class TestBlocks:
    @given(SHAPES, BLOCKS)
    def test_every_element_belongs_to_the_block_that_the_rule_names(self, shape, block):
        layout = BlockLayout.of(shape, block)
        expected = block_of_each_element(shape, block)
        i = np.arange(layout.size)
        found = (i // (layout.length * layout.inner)) * layout.inner + i % layout.inner
        spread = np.empty(layout.size)
        pieces.spread(np.arange(layout.num_blocks, dtype=float), layout.length, layout.inner, 0, spread)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(spread, expected)
        np.testing.assert_array_equal(layout.block_sizes, np.bincount(expected))

    def test_a_volume_has_a_block_a_slice_and_a_vector_field_one_a_component_and_slice(self):
        assert BlockLayout.of((6, 5, 4), "slice").num_blocks == 4
        assert BlockLayout.of((3, 6, 5, 4), "slice").num_blocks == 12

    def test_an_empty_array_has_no_blocks(self):
        array = np.empty((0, 4, 3), np.float32)
        qsgd = Qsgd(5, coding="fixed")
        message = qsgd.encode(array, stream())
        assert message.segment(0, 0).size == qsgd.segment_bytes(array.shape, array.dtype, 0, 0) == 0
        assert message.paper_bits == 0

    @pytest.mark.parametrize("compressor", [Qsgd, Grid])
    @pytest.mark.parametrize("options", [{"block": "rows"}, {"block": "0"}, {"block": "-3"}, {"block": ""},
                                         {"block": "²"}, {"quantize": -1}, {"quantize": 1 << 21}])  # fmt: skip
    def test_options_that_make_no_sense_are_refused(self, compressor, options):
        with pytest.raises(ConfigError, match=f"--{next(iter(options))}"):
            compressor(**options)


class TestRaw:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_segments_are_views_and_add_up_in_float64(self, dtype):
        array = stream().standard_normal((5, 7)).astype(dtype)
        message = Raw().encode(array)
        total = np.zeros(array.size)
        for start, stop in pairwise((0, 8, 24, 35)):
            segment = message.segment(start, stop)
            assert np.shares_memory(segment, array)
            assert segment.size == Raw().segment_bytes(array.shape, dtype, start, stop)
            Raw().accumulate(total[start:stop], segment, array.shape, dtype, start, stop)
            Raw().accumulate(total[start:stop], segment, array.shape, dtype, start, stop, 0.1)
        wide = array.reshape(-1).astype(float)
        np.testing.assert_array_equal(total, wide + wide * 0.1)
        assert message.paper_bits == 32 * 35

    def test_an_array_in_another_memory_order_is_sent_in_c_order(self):
        array = stream().standard_normal((4, 6)).T
        np.testing.assert_array_equal(Raw().encode(array).segment(0, 24).view(float), array.flatten())


class TestQsgd:
    @pytest.mark.parametrize(("size", "num_levels"), [(50, 1), (50, 4), (400, 20), (400, 30000)])
    def test_mean_and_variance_are_those_of_the_closed_form(self, size, num_levels):
        vector = stream(1).standard_normal(size).astype(np.float32)
        num_messages = 4000
        copies = np.tile(vector, (num_messages, 1))
        qsgd = Qsgd(num_levels, block=str(size))
        error = decode(qsgd, qsgd.encode(copies, stream(2)), copies) - vector.astype(float)
        variance = exact_variance(vector, np.linalg.norm(vector.astype(float)), num_levels)

        deviation = np.sqrt(variance / num_messages)
        # The norm is sent in float32.
        rounding = 1e-7 * np.abs(vector)
        assert np.all(np.abs(error.mean(axis=0)) <= 4 * deviation + rounding)

        squared = np.sum(error**2, axis=1)
        uncertainty = squared.std() / np.sqrt(num_messages)
        assert abs(squared.mean() - variance.sum()) <= 4 * uncertainty

        bound = min(size / num_levels**2, np.sqrt(size) / num_levels) * np.sum(vector.astype(float) ** 2)
        assert squared.mean() <= bound

    @pytest.mark.parametrize(("size", "num_levels"), [(1000, 1), (1000, 5), (20, 30)])
    def test_few_levels_are_not_zero(self, size, num_levels):
        copies = np.tile(stream(3).standard_normal(size), (500, 1))
        message = Qsgd(num_levels, block=str(size)).encode(copies, stream(4))
        assert np.count_nonzero(message.levels) / 500 <= num_levels * (num_levels + np.sqrt(size))

    @given(SHAPES, BLOCKS, LEVELS, CODINGS, st.sampled_from([np.float32, np.float64]), st.integers(0, 2**32), st.data())
    @settings(max_examples=100, deadline=None)
    def test_any_cut_gives_the_decoded_message_bit_for_bit(self, shape, block, num_levels, coding, dtype, seed, data):
        array = stream(seed).standard_normal(shape).astype(dtype)
        blocks = block_of_each_element(shape, block)
        qsgd = Qsgd(num_levels, block, coding)
        message = qsgd.encode(array, stream(seed + 1))

        flat = array.reshape(-1).astype(float)
        norms = np.sqrt(np.bincount(blocks, flat**2))
        np.testing.assert_allclose(message.norms, norms, rtol=1e-7)
        exact = num_levels * np.abs(flat) / message.norms.astype(float)[blocks]
        levels = message.levels.astype(float)
        assert np.all(np.abs(np.abs(levels) - exact) < 1 + 1e-6 * num_levels)
        assert np.all(np.abs(levels) <= num_levels)
        assert np.all(levels * flat >= 0)

        eighths = data.draw(st.lists(st.integers(0, array.size // 8), max_size=4))
        cuts = sorted({0, array.size, *(8 * each for each in eighths)})
        weight = data.draw(st.sampled_from([1.0, 0.3]))
        total = np.full(array.size, 0.25)
        for start, stop in pairwise(cuts):
            segment = message.segment(start, stop)
            assert qsgd.segment_bytes(shape, dtype, start, stop) in (segment.size, None)
            qsgd.accumulate(total[start:stop], segment, shape, dtype, start, stop, weight)
        coefficients = message.norms.astype(float) * weight / num_levels
        np.testing.assert_array_equal(total, 0.25 + coefficients[blocks] * levels)
        assert sum(message.formats.values()) == len(cuts) - 1

    @pytest.mark.parametrize("num_levels", [1, 3, 5, 20, 100, 1000, 30000, 70000])
    def test_packed_levels_lie_where_the_wire_format_says(self, num_levels):
        """Read the planes with NumPy's bit order, not with the package's kernel."""
        array = stream(5).standard_normal(2048 + 21)
        message = Qsgd(num_levels, "all", "fixed").encode(array, stream(6))
        segment = message.segment(0, array.size)
        assert segment[:4].view(np.float32) == message.norms
        assert segment[4] == 0
        width = 1 + int(np.ceil(np.log2(num_levels + 1)))
        position, decoded = 5, []
        for padded in (2048, 24):
            codes = np.zeros(padded, np.int64)
            shift = 0
            for plane in (8, 8, 8, 4, 2, 1):
                if shift + plane > width:
                    continue
                num_bytes = padded * plane // 8
                bits = np.unpackbits(segment[position : position + num_bytes, None], axis=1, bitorder="little")
                fields = bits.reshape(num_bytes, 8 // plane, plane) @ (1 << np.arange(plane))
                codes += fields.T.reshape(-1) << shift
                position += num_bytes
                shift += plane
            decoded.append(codes - num_levels)
        assert position == segment.size == 5 + width * (2048 + 24) // 8
        np.testing.assert_array_equal(np.concatenate(decoded)[: array.size], message.levels)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("num_levels", [1, 127, 128, 1000, 30000, 1 << 20])
    def test_a_vector_with_one_entry_has_the_top_level_and_comes_back(self, dtype, num_levels):
        array = np.zeros((500, 41), dtype)
        # In float32 this is rounded down, so that the entry exceeds the norm that is sent.
        array[:, 37] = -(1 + 2.0**-25)
        qsgd = Qsgd(num_levels, block="41")
        message = qsgd.encode(array, stream())
        assert np.all(message.levels.reshape(array.shape)[:, 37] == -num_levels)
        expected = array.astype(np.float32)
        np.testing.assert_allclose(decode(qsgd, message, array), expected, rtol=1e-15, atol=0)

    def test_zero_blocks_stay_zero_among_others(self):
        array = stream().standard_normal((8, 8, 3)).astype(np.float32)
        array[:, :, 1] = 0
        decoded = decode(Qsgd(50), Qsgd(50).encode(array, stream()), array)
        assert np.all(decoded[:, :, 1] == 0)
        assert np.any(decoded[:, :, 0] != 0)
        assert np.all(decode(Qsgd(1), Qsgd(1).encode(0 * array, stream()), array) == 0)

    def test_norms_beyond_the_range_of_products_in_float32_are_fine(self):
        array = np.array([3e37, -4e37, 0, 0], np.float32)
        qsgd = Qsgd(5)
        np.testing.assert_allclose(decode(qsgd, qsgd.encode(array, stream()), array), array, rtol=1e-6)
        np.testing.assert_allclose(decode(qsgd, qsgd.encode(array * 1e-37 * 1e-37, stream()), array), 0, atol=1e-30)

    @pytest.mark.parametrize(
        ("num_levels", "dtype"), [(127, np.int8), (128, np.int16), (32767, np.int16), (32768, np.int32)]
    )
    def test_levels_are_held_in_the_narrowest_type(self, num_levels, dtype):
        assert Qsgd(num_levels).encode(np.ones(3), stream()).levels.dtype == dtype

    @pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e200])
    @pytest.mark.parametrize("block", ["slice", "all", "7"])
    def test_what_is_not_finite_is_refused(self, wrong, block):
        array = np.ones((4, 4, 4))
        array[1, 2, 3] = wrong
        for attempt in (lambda: Qsgd(5, block).encode(array, stream()), lambda: Grid(5, block).scales(array)):
            with pytest.raises(DivergedError, match=r"^(qsgd|grid) cannot quantize block \d"):
                attempt()

    def test_memory_order_and_protection_of_the_array_do_not_matter(self):
        array = stream().standard_normal((6, 5, 4)).astype(np.float32)
        strided = np.repeat(array, 2, axis=2)[:, :, ::2]
        fortran = np.asfortranarray(array)
        protected = array.copy()
        protected.flags.writeable = False
        whole = [Qsgd(9).encode(each, stream(8)).segment(0, 120) for each in (array, strided, fortran, protected)]
        for each in whole[1:]:
            np.testing.assert_array_equal(each, whole[0])
        with pytest.raises(TypeError, match="int64"):
            Qsgd(9).encode(np.arange(4), stream())

    def test_a_message_is_a_function_of_its_stream(self):
        array = stream().standard_normal(100_000)
        first, again, other = (Qsgd(9).encode(array, stream(seed)).levels for seed in (1, 1, 2))
        np.testing.assert_array_equal(first, again)
        assert np.any(first != other)
        # Every element has a number of its own: at s = 1, equal elements are rounded up independently.
        up = Qsgd(1).encode(np.ones(200_000), stream(3)).levels.reshape(2, -1)
        assert np.any(up[0] != up[1])

    def test_a_segment_that_does_not_fit_is_refused(self):
        qsgd, array = Qsgd(9), np.ones(64)
        segment = qsgd.encode(array, stream()).segment(0, 64)
        with pytest.raises(DataError, match="no segment of 64 levels"):
            qsgd.accumulate(np.zeros(64), segment[:-1], array.shape, array.dtype, 0, 64)
        for total, data in ((np.zeros(63), segment), (np.zeros(64), segment[:3])):
            with pytest.raises(ValueError, match="qsgd cannot add"):
                qsgd.accumulate(total, data, array.shape, array.dtype, 0, 64)

    @pytest.mark.parametrize("compressor", [Qsgd, Grid])
    def test_no_levels_mean_that_nothing_can_be_encoded(self, compressor):
        arguments = (stream(),) if compressor is Qsgd else (np.ones(1, np.float32), stream(), 2)
        with pytest.raises(ConfigError, match="--quantize 0"):
            compressor().encode(np.ones(3), *arguments)


class TestRounding:
    @pytest.mark.parametrize(
        ("counter", "key", "expected"),
        [
            ("0" * 32, "0" * 16, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
            ("f" * 32, "f" * 16, "408f276d41c83b0ea20bc7c66d5451fd"),
            ("243f6a8885a308d313198a2e03707344", "a4093822299f31d0", "d16cfe0994fdcceb5001e42024126ea1"),
        ],
    )
    def test_the_yardstick_gives_the_published_numbers(self, counter, key, expected):
        """Known answers that come with the Random123 library."""
        assert "".join(f"{word:08x}" for word in philox(words_of(counter), words_of(key))) == expected

    @pytest.mark.parametrize("key", [0, 1, 2**64 - 1, 0x0123456789ABCDEF])
    @pytest.mark.parametrize("counter", [0, 512, 2**32 - 5, 2**40])
    def test_random_words_are_those_of_philox(self, key, counter):
        words = np.empty(pieces.PIECE, np.uint32)
        rounding.random_words(key, counter, words)
        for j in (0, 1, 5, 511):
            low, high = (counter + j) % 2**32, (counter + j) // 2**32
            assert words[j::512].tolist() == philox([low, high, 0, 0], [key % 2**32, key // 2**32])

    def test_numbers_are_uniform_and_independent_between_elements_and_messages(self):
        """At s = 1 a value of 3/16 is rounded up with that probability; pairs of messages are counted in a table."""
        n, p = 1 << 18, 3 / 16
        values, scale = np.full(n, p), np.ones(1, np.float32)
        layout = BlockLayout.of((n,), "all")
        rng = stream(1)
        up = [rounding.quantize(values, scale, layout, 1, each, np.dtype(np.int8)) for each in (rng, rng, stream(2))]
        probabilities = np.outer([1 - p, p], [1 - p, p]).reshape(-1)
        pairs = [(up[0], up[1]), (up[0], up[2])]
        pairs += [(up[0][:-lag], up[0][lag:]) for lag in (1, 2, 511, 512, 513, 2048)]
        for one, other in pairs:
            counts = np.bincount(2 * one + other, minlength=4)
            statistic = np.sum((counts - one.size * probabilities) ** 2 / (one.size * probabilities))
            # Chi-square with 3 degrees of freedom exceeds this once in 10^6.
            assert statistic < 30.7

    @pytest.mark.parametrize("cut", [1, 2047, 2048, 5000])
    def test_an_elements_number_depends_on_its_place_alone(self, cut):
        values, scale = stream().standard_normal(9000), np.ones(1, np.float32)
        levels = [
            rounding.quantize(values[:size], scale, BlockLayout.of((size,), "all"), 9, stream(1), np.dtype(np.int8))
            for size in (9000, cut)
        ]
        np.testing.assert_array_equal(levels[0][:cut], levels[1])


class TestGrid:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("num_levels", [1, 6, 1000, 30000])
    def test_mean_and_variance_are_those_of_the_closed_form(self, dtype, num_levels):
        vector = stream(1).standard_normal(60).astype(dtype)
        num_messages = 4000
        copies = np.tile(vector, (num_messages, 1))
        grid = Grid(num_levels, block="60")
        # Another client's values are larger.
        scales = grid.scales(copies) * np.float32(1.5)
        levels = grid.encode(copies, scales, stream(2), count=1)
        error = grid.decode(levels, scales, 1, np.float64) - vector
        variance = exact_variance(vector, float(scales[0]), num_levels)
        assert np.all(np.abs(error.mean(axis=0)) <= 4 * np.sqrt(variance / num_messages) + 1e-15)
        squared = np.sum(error**2, axis=1)
        assert abs(squared.mean() - variance.sum()) <= 4 * squared.std() / np.sqrt(num_messages)

    @given(SHAPES, BLOCKS, st.sampled_from([np.float32, np.float64]), st.integers(0, 2**32))
    @settings(deadline=None)
    def test_scales_are_the_largest_magnitudes_and_cover_them(self, shape, block, dtype, seed):
        array = stream(seed).standard_normal(shape).astype(dtype)
        blocks = block_of_each_element(shape, block)
        scales = Grid(5, block).scales(array)
        expected = np.zeros(blocks.max() + 1)
        np.maximum.at(expected, blocks, np.abs(array.reshape(-1)))
        assert scales.dtype == np.float32
        assert np.all(scales >= expected)
        np.testing.assert_allclose(scales, expected, rtol=2e-7)

    @given(SHAPES, BLOCKS, st.sampled_from([np.float32, np.float64]), st.integers(0, 2**32))
    @settings(deadline=None)
    def test_the_decoded_sum_is_the_mean_of_the_rounded_values(self, shape, block, dtype, seed):
        rng = stream(seed)
        num_levels, clients = 300, [rng.standard_normal(shape).astype(dtype) for _ in range(3)]
        grid, blocks = Grid(num_levels, block), block_of_each_element(shape, block)
        scales = np.max([grid.scales(each) for each in clients], axis=0)
        levels = [grid.encode(each, scales, rng, count=3) for each in clients]
        mean = grid.decode(sum(levels), scales, 3, dtype)
        step = scales.astype(float)[blocks].reshape(shape) / num_levels
        for client, level in zip(clients, levels, strict=True):
            assert level.shape == shape
            assert np.all(np.abs(level * step - client) <= step * (1 + 1e-6))
        assert mean.dtype == dtype
        rounding = 1e-6 if dtype == np.float32 else 1e-14
        np.testing.assert_allclose(mean, np.mean([each * step for each in levels], axis=0), rtol=rounding, atol=1e-15)

    @pytest.mark.parametrize(
        ("num_levels", "count", "dtype"),
        [(127, 1, np.int8), (7, 17, np.int8), (8, 17, np.int16), (1927, 17, np.int16), (1928, 17, np.int32),
         (30000, 71582, np.int32)],
    )  # fmt: skip
    @pytest.mark.parametrize("sign", [-1, 1])
    def test_sums_of_top_levels_do_not_overflow(self, num_levels, count, dtype, sign):
        array = np.full(33, sign * 0.7)
        grid = Grid(num_levels)
        scales = grid.scales(array)
        # 0.7 is no float32, so the scale lies a little above; exactly on the grid the top level is certain.
        levels = grid.encode(np.full(33, sign * float(scales[0])), scales, stream(), count)
        assert levels.dtype == grid.level_type(count) == dtype
        total = (levels[:, None] * np.ones(min(count, 1000), dtype)).sum(axis=1, dtype=dtype)
        assert np.all(levels == sign * num_levels)
        assert num_levels * count <= np.iinfo(dtype).max
        np.testing.assert_array_equal(total, sign * num_levels * min(count, 1000))

    def test_too_many_clients_for_32_bits_are_refused_with_the_number_that_fits(self):
        with pytest.raises(ConfigError, match="--quantize 29999 or fewer") as caught:
            Grid(30000).level_type((2**31 - 1) // 29999)
        assert isinstance(caught.value, HpcfedError)

    def test_zero_scales_give_zeros(self):
        array = np.zeros((4, 4, 2), np.float32)
        grid = Grid(9)
        levels = grid.encode(array, grid.scales(array), stream(), 4)
        assert not levels.any()
        assert not grid.decode(levels, grid.scales(array), 4).any()

    def test_scales_of_another_array_are_refused(self):
        with pytest.raises(ValueError, match="for 2 blocks"):
            Grid(9).encode(np.ones((4, 4, 2)), np.ones(3, np.float32), stream(), 4)

    def test_the_papers_bits_are_scales_and_levels_of_fixed_width(self):
        assert Grid(1000).paper_bits((3, 6, 5, 4)) == 12 * 32 + 360 * 11
