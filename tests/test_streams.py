"""Streams: found by address, whoever asks and in whatever order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpcfed.streams import Purpose, Streams


def draw(streams, count=8, **address):
    return streams.generator(address.pop("purpose", Purpose.CLIENT), **address).random(count)


def test_an_address_gives_the_same_numbers_at_every_call_and_from_every_copy():
    first = draw(Streams(5), round=3, call=1, client=2)
    np.testing.assert_array_equal(draw(Streams(5), round=3, call=1, client=2), first)


def test_what_other_streams_drew_before_changes_nothing():
    streams = Streams(5)
    alone = draw(streams, round=2, client=7)
    for client in range(7):
        draw(streams, count=1000 + client, round=2, client=client)
    np.testing.assert_array_equal(draw(streams, round=2, client=7), alone)


def test_addresses_that_differ_anywhere_give_different_numbers():
    grid = itertools.product((0, 1), Purpose, range(3), range(3), range(3))
    addresses = [(seed, {"purpose": p, "round": r, "call": k, "client": c}) for seed, p, r, k, c in grid]
    assert len({draw(Streams(seed), **address).tobytes() for seed, address in addresses}) == len(addresses)


@pytest.mark.parametrize("place", ["round", "call", "client"])
def test_neighbouring_streams_are_uncorrelated(place):
    """The correlation of n independent pairs has standard deviation 1/sqrt(n); six of them are allowed."""
    count = 20_000
    drawn = np.array([draw(Streams(1), count, **{place: number}) for number in range(6)])
    correlations = np.corrcoef(drawn)[np.triu_indices(6, 1)]
    assert np.abs(correlations).max() < 6 / np.sqrt(count)


def test_the_construction_is_the_published_one():
    """Philox, keyed by SeedSequence's spawn key: another program can draw the same numbers."""
    key = (int(Purpose.COMPRESSION), 4, 2, 16)
    expected = np.random.Generator(np.random.Philox(np.random.SeedSequence(11, spawn_key=key))).random(8)
    np.testing.assert_array_equal(draw(Streams(11), purpose=Purpose.COMPRESSION, round=4, call=2, client=16), expected)


def test_purposes_keep_their_numbers():
    """Renumbering would change the digest of every run."""
    assert [Purpose.DATA, Purpose.COHORT, Purpose.CLIENT, Purpose.COMPRESSION, Purpose.SPLIT, Purpose.START] == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip
    assert len({int(purpose) for purpose in Purpose}) == len(Purpose)
