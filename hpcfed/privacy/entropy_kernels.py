"""ChaCha20 as a source of random bits for NumPy (Bernstein 2008; the block function is that of RFC 8439).

The state of a stream is 33 words of 32 bits: the block's input (constants, key, counter, nonce), the last block, and
how many of its words were used.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit, types

WORDS = 33
_COUNTER, _BLOCK, _USED = 12, 16, 32

_words = types.uint32[::1]
_word = types.uint32
_compile = {"cache": True, "error_model": "numpy", "nogil": True}


@njit(inline="always")
def _turned(word, count):  # type: ignore[no-untyped-def]
    return np.uint32((word << np.uint32(count)) | (word >> np.uint32(32 - count)))


@njit(types.UniTuple(_word, 4)(_word, _word, _word, _word), **_compile)
def _quarter(a, b, c, d):  # type: ignore[no-untyped-def]
    a = np.uint32(a + b)
    d = _turned(np.uint32(d ^ a), 16)
    c = np.uint32(c + d)
    b = _turned(np.uint32(b ^ c), 12)
    a = np.uint32(a + b)
    d = _turned(np.uint32(d ^ a), 8)
    c = np.uint32(c + d)
    b = _turned(np.uint32(b ^ c), 7)
    return a, b, c, d


@njit(types.void(_words, _words), **_compile)
def block(given, out):  # type: ignore[no-untyped-def]
    """Write the block of an input of 16 words."""
    a0, a1, a2, a3 = given[0], given[1], given[2], given[3]
    b0, b1, b2, b3 = given[4], given[5], given[6], given[7]
    c0, c1, c2, c3 = given[8], given[9], given[10], given[11]
    d0, d1, d2, d3 = given[12], given[13], given[14], given[15]
    for _ in range(10):
        a0, b0, c0, d0 = _quarter(a0, b0, c0, d0)
        a1, b1, c1, d1 = _quarter(a1, b1, c1, d1)
        a2, b2, c2, d2 = _quarter(a2, b2, c2, d2)
        a3, b3, c3, d3 = _quarter(a3, b3, c3, d3)
        a0, b1, c2, d3 = _quarter(a0, b1, c2, d3)
        a1, b2, c3, d0 = _quarter(a1, b2, c3, d0)
        a2, b3, c0, d1 = _quarter(a2, b3, c0, d1)
        a3, b0, c1, d2 = _quarter(a3, b0, c1, d2)
    out[0], out[1], out[2], out[3] = a0, a1, a2, a3
    out[4], out[5], out[6], out[7] = b0, b1, b2, b3
    out[8], out[9], out[10], out[11] = c0, c1, c2, c3
    out[12], out[13], out[14], out[15] = d0, d1, d2, d3
    for i in range(16):
        out[i] = np.uint32(out[i] + given[i])


@njit(_word(_words), **_compile)
def _next_word(state):  # type: ignore[no-untyped-def]
    used = state[_USED]
    if used == 16:
        block(state[:_BLOCK], state[_BLOCK:_USED])
        state[_COUNTER] = np.uint32(state[_COUNTER] + np.uint32(1))
        if state[_COUNTER] == 0:
            state[_COUNTER + 1] = np.uint32(state[_COUNTER + 1] + np.uint32(1))
        used = np.uint32(0)
    state[_USED] = np.uint32(used + np.uint32(1))
    return state[_BLOCK + np.int64(used)]


@njit(types.uint64(_words), **_compile)
def _next_long(state):  # type: ignore[no-untyped-def]
    low = np.uint64(_next_word(state))
    return low | (np.uint64(_next_word(state)) << np.uint64(32))


@cfunc(_word(types.CPointer(_word)), cache=True)
def next_uint32(address):  # type: ignore[no-untyped-def]
    return _next_word(carray(address, (WORDS,)))


@cfunc(types.uint64(types.CPointer(_word)), cache=True)
def next_uint64(address):  # type: ignore[no-untyped-def]
    return _next_long(carray(address, (WORDS,)))


@cfunc(types.float64(types.CPointer(_word)), cache=True)
def next_double(address):  # type: ignore[no-untyped-def]
    return (_next_long(carray(address, (WORDS,))) >> np.uint64(11)) * 2.0**-53
