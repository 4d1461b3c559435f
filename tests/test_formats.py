"""Formats of levels on the wire: what is written is read, is as long as the closed forms say, and damage is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from hpcfed.compressors import elias, formats
from hpcfed.compressors.blocks import BlockLayout
from hpcfed.compressors.formats import Format, add_levels, decode_levels, encode_levels
from hpcfed.compressors.pieces import level_type
from hpcfed.compressors.qsgd import Qsgd
from hpcfed.errors import DataError

CODINGS = ["fast", "fixed", "elias", "entropy", "auto"]
LEVELS = [1, 2, 3, 20, 127, 128, 1000, 40_000, 1 << 20]


def stream(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def gaussian_levels(size, block, num_levels, seed=0):
    """Levels of a Gaussian vector, in blocks of so many."""
    return Qsgd(num_levels, str(block)).encode(stream(seed).standard_normal(size), stream(seed + 1000)).levels


def entropy_of_gaussian_levels(block, num_levels):
    """Bits of a level of a long Gaussian vector whose norm is that of its blocks' expectation, by summing its law."""
    step = np.sqrt(block) / num_levels
    z = np.linspace(0, 9, 2_000_001)
    position = z / step
    low = np.floor(position)
    mass = 2 * norm.pdf(z) * (z[1] - z[0])
    mass[0] /= 2
    law = np.bincount(low.astype(int), mass * (1 - position + low), low.astype(int).max() + 2)
    law += np.bincount(low.astype(int) + 1, mass * (position - low), law.size)
    law = np.concatenate([law[:1], law[1:] / 2, law[1:] / 2])
    law = law[law > 0] / law.sum()
    return -(law * np.log2(law)).sum()


@st.composite
def segments(draw):
    """Levels of many kinds: few or many that are not zero, small and large, over several pieces, and none at all."""
    num_levels = draw(st.sampled_from(LEVELS))
    size = draw(st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 500, 2047, 2048, 2049, 5000]))
    rng = stream(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 0.3, 3.0, 1e9])) if draw(st.booleans()) else num_levels / 3
    levels = np.clip(np.rint(rng.standard_normal(size) * scale), -num_levels, num_levels)
    levels[rng.random(size) > draw(st.sampled_from([1.0, 0.5, 0.05, 0.001]))] = 0
    return levels.astype(level_type(num_levels)), num_levels


class TestRoundTrip:
    @given(segments(), st.sampled_from(CODINGS))
    @settings(max_examples=200, deadline=None)
    def test_what_is_written_is_read(self, segment, coding):
        levels, num_levels = segment
        data = encode_levels(levels, num_levels, coding)
        read = decode_levels(data, levels.size, num_levels)
        assert read.dtype == levels.dtype
        np.testing.assert_array_equal(read, levels)

    @given(segments(), st.sampled_from(CODINGS), st.integers(1, 40), st.sampled_from([1, 3]), st.integers(0, 99))
    @settings(max_examples=200, deadline=None)
    def test_what_is_added_is_coefficient_times_level_to_the_last_bit(self, segment, coding, length, inner, start):
        levels, num_levels = segment
        layout = BlockLayout(10**6, 10**6 // (length * inner), length, inner)
        places = start + np.arange(levels.size)
        blocks = places // (length * inner) * inner + places % inner
        coefficients = stream(1).random(6000 + start)
        total = np.full(levels.size, 0.1)
        data = encode_levels(levels, num_levels, coding, front=4)[4:]
        add_levels(data, num_levels, coefficients, layout, start, total)
        np.testing.assert_array_equal(total, 0.1 + coefficients[blocks] * levels)

    @pytest.mark.parametrize("coding", CODINGS)
    @pytest.mark.parametrize("num_levels", LEVELS)
    @pytest.mark.parametrize("level", [0, 1, -1, "top", "bottom"])
    @pytest.mark.parametrize("size", [1, 10_000])
    def test_a_single_symbol(self, coding, num_levels, level, size):
        level = {"top": num_levels, "bottom": -num_levels}.get(level, level)
        levels = np.full(size, level, level_type(num_levels))
        data = encode_levels(levels, num_levels, coding)
        np.testing.assert_array_equal(decode_levels(data, size, num_levels), levels)
        if coding in ("auto", "entropy") and abs(level) < 16:
            assert data.size <= 28  # frequencies say it all

    @pytest.mark.parametrize("coding", CODINGS)
    def test_no_levels_are_no_bytes(self, coding):
        data = encode_levels(np.empty(0, np.int8), 5, coding)
        assert data.size == 0
        assert decode_levels(data, 0, 5).size == 0
        assert encode_levels(np.empty(0, np.int8), 5, coding, front=8).size == 8

    def test_long_gaps(self):
        """Beyond every table and every length of a byte's field."""
        levels = np.zeros(1_200_000, np.int8)
        levels[[0, 63, 127, 191, 320, 16_700, 70_000, 1_199_999]] = [1, -1, 2, -3, 100, 1, -1, 7]
        for coding in ("fast", "elias"):
            data = encode_levels(levels, 100, coding)
            assert data.size < 30
            np.testing.assert_array_equal(decode_levels(data, levels.size, 100), levels)

    def test_a_slice_that_begins_anywhere(self):
        levels = gaussian_levels(1000, 1000, 20)
        for start in range(9):
            for coding in CODINGS:
                data = encode_levels(levels[start:], 20, coding)
                np.testing.assert_array_equal(decode_levels(data, 1000 - start, 20), levels[start:])

    def test_the_same_levels_are_the_same_bytes(self):
        levels = gaussian_levels(20_000, 5000, 300)
        for coding in CODINGS:
            first, again = (encode_levels(each, 300, coding) for each in (levels, levels.copy()))
            assert first.tobytes() == again.tobytes()


class TestLength:
    @pytest.mark.parametrize(
        ("size", "num_levels", "published"),
        [
            (123, 20, (3.9, 4.0, 6)),
            (123, 500, (12.1, 11.3, 10)),
            (123, 1000, (13.6, 12.8, 11)),
            (123, 5000, (16.9, 16.0, 14)),
            (65536, 20, (0.60, 1.19, 6)),
            (65536, 500, (3.9, 4.0, 10)),
            (65536, 1000, (5.5, 5.4, 11)),
            (65536, 5000, (10.0, 9.3, 14)),
        ],
    )
    def test_bits_a_coordinate_of_gaussian_vectors(self, monkeypatch, size, num_levels, published):
        """Those of single vectors by an independent implementation, to the digits that it gives."""
        vectors = [gaussian_levels(size, size, num_levels, seed) for seed in range(4 if size > 1000 else 100)]
        last_digit = 0.01 if published[0] < 1 else 0.1
        for form, expected in zip((Format.SPARSE, Format.DENSE, Format.FIXED), published, strict=True):
            only(monkeypatch, form)
            written = [encode_levels(levels, num_levels, "elias") for levels in vectors]
            assert all(data[0] == form for data in written)
            bits = 8 * np.array([data.size - 1 for data in written]) / size
            # Bytes are filled up: Elias's by up to 7 bits, packed ones to 8 levels.
            filled = 7 / size if form != Format.FIXED else expected * 7 / size
            assert -last_digit / 2 - 3 * bits.std() <= bits.mean() - expected
            assert bits.mean() - expected <= last_digit / 2 + 3 * bits.std() + filled

    @given(segments())
    @settings(max_examples=100, deadline=None)
    def test_elias_takes_the_counted_bits_in_whole_bytes(self, segment):
        levels, num_levels = segment
        if levels.size:
            counted = elias.count_bits(levels, BlockLayout.of(levels.shape, "all"), num_levels)[0, :2]
            expected = -(-(counted.min() - elias.NORM_BITS - elias.TAG_BITS) // 8)
            assert encode_levels(levels, num_levels, "elias").size == 1 + expected

    @given(st.lists(st.integers(-40, 40) | st.just(0), min_size=1, max_size=60), st.sampled_from(["sparse", "dense"]))
    @settings(deadline=None)
    def test_elias_writes_the_bits_of_the_papers_code(self, levels, form):
        """Against the code as strings, without norm and tag, filled up with ones."""
        levels = np.array(levels, np.int8)
        data = encode_levels(levels, 40, "elias")
        bits = elias.encode_block(0.0, levels, 40, formats.format_of(data))[34:]
        bits += "1" * (-len(bits) % 8)
        assert data[1:].tobytes() == bytes(int(bits[k : k + 8], 2) for k in range(0, len(bits), 8))

    @pytest.mark.parametrize(
        ("block", "num_levels", "published"),
        [
            (123, 20, 2.93), (123, 500, 7.54), (123, 1000, 8.54), (123, 5000, 10.86),
            (65536, 20, 0.40), (65536, 500, 3.04), (65536, 1000, 4.02), (65536, 5000, 6.33),
        ],
    )  # fmt: skip
    def test_entropy_coding_comes_within_three_percent(self, block, num_levels, published):
        entropy = entropy_of_gaussian_levels(block, num_levels)
        assert abs(entropy - published) < 0.02
        size = 123 * 82 if block == 123 else block  # at least 10,000
        data = encode_levels(gaussian_levels(size, block, num_levels), num_levels, "entropy")
        assert data[0] == Format.ENTROPY
        assert 8 * data.size / size < 1.03 * entropy

    @pytest.mark.parametrize("coding", CODINGS)
    @given(segments())
    @settings(max_examples=60, deadline=None)
    def test_auto_is_never_longer(self, coding, segment):
        levels, num_levels = segment
        # The length of an entropy code is estimated before it is made, to a few bytes.
        assert encode_levels(levels, num_levels, "auto").size <= encode_levels(levels, num_levels, coding).size + 8

    @given(segments())
    @settings(max_examples=60, deadline=None)
    def test_fast_is_never_much_longer_than_fixed(self, segment):
        levels, num_levels = segment
        pieces = -(-levels.size // 2048)
        assert encode_levels(levels, num_levels, "fast").size <= formats.fixed_bytes(levels.size, num_levels) + pieces

    def test_bytes_take_one_for_most_levels(self):
        """A byte for 1 and -1 after fewer than 63 zeros, one more for each larger magnitude or longer gap below 191."""
        levels = np.zeros(20_000, np.int16)
        levels[::50] = 1
        levels[::400] = -1
        levels[::2000] = 90
        levels[10_000:] = 0
        levels[10_100::150] = 1
        data = encode_levels(levels, 200, "fast")
        assert data[0] == Format.BYTES
        assert data.size == 1 + 200 + 5 + 2 * len(levels[10_100::150])

    def test_narrow_takes_what_each_piece_needs(self):
        """Signed: 8 bits up to 127, 3 up to 3, none for zeros; and one byte a piece to say so."""
        levels = np.zeros(3 * 2048 + 10, np.int16)
        levels[:2048] = np.arange(2048) % 255 - 127
        levels[2048:4096] = np.arange(2048) % 7 - 3
        levels[6144:] = 1
        data = encode_levels(levels, 1000, "fast")
        assert data[0] == Format.NARROW
        assert data[1:5].tolist() == [8, 3, 0, 2]
        assert data.size == 1 + 4 + 2048 + 768 + 2 * 2


class TestDamage:
    @pytest.mark.parametrize("tag", [6, 17, 255])
    def test_an_unknown_tag_is_named(self, tag):
        data = np.array([tag, 1, 2, 3], np.uint8)
        for attempt in (
            lambda: decode_levels(data, 8, 3),
            lambda: add_levels(data, 3, np.ones(1), BlockLayout.of((8,), "all"), 0, np.zeros(8)),
        ):
            with pytest.raises(DataError, match=f"format {tag}, not one of fixed 0, sparse 1"):
                attempt()

    @pytest.mark.parametrize("form", list(Format))
    def test_too_few_or_too_many_bytes_are_refused(self, monkeypatch, form):
        levels = gaussian_levels(3000, 3000, 40)
        only(monkeypatch, form)
        data = encode_levels(levels, 40, "fast")
        assert data[0] == form
        layout = BlockLayout.of(levels.shape, "all")
        wrong = [data[:1], data[:-3], np.concatenate([data, np.full(9, 255, np.uint8)])]
        # What is cut off between two levels are the levels up to there, and zeros, where zeros are not written.
        for each in wrong[{Format.SPARSE: 1, Format.BYTES: 2}.get(form, 0) :]:
            with pytest.raises(DataError, match=f"{form.name.lower()} are no segment of 3000 levels"):
                decode_levels(each, 3000, 40)
            with pytest.raises(DataError, match="no segment of 3000 levels"):
                add_levels(each, 40, np.ones(1), layout, 0, np.zeros(3000))

    @pytest.mark.parametrize("form", [each for each in Format if each != Format.FIXED])
    def test_noise_is_no_crash_and_no_level_beyond_the_top(self, monkeypatch, form):
        rng = stream(4)
        for _ in range(300):
            noise = rng.integers(0, 256, rng.integers(1, 60), np.uint8)
            noise[0] = form
            try:
                levels = decode_levels(noise, 50, 127)
            except DataError:
                continue
            assert np.abs(levels.astype(int)).max() <= 127


def only(monkeypatch, form):
    """Let every coding try this format alone, beside one that loses where `bytes` needs a yardstick."""
    tried = (form,) if form != Format.BYTES else (Format.FIXED, form)
    monkeypatch.setattr(formats, "_CHOICES", dict.fromkeys(CODINGS, tried))
