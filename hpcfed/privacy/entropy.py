"""Random numbers that nobody can repeat or foresee: NumPy's distributions on ChaCha20, keyed by the operating system.

NumPy's own generators are made for simulations: what they will draw can be worked out from what they have drawn.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CONSTANTS = b"expand 32-byte k"


class _Bits(ctypes.Structure):
    """What NumPy asks of a source of bits (``bitgen_t`` of its C interface)."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("state", "next_uint64", "next_uint32", "next_double", "next_raw")]


class ChaCha20:
    """A source of bits for ``numpy.random.Generator``.

    Parameters
    ----------
    key : 32 bytes.
    """

    _name = b"BitGenerator"

    def __init__(self, key: bytes) -> None:
        from hpcfed.privacy import entropy_kernels as kernels

        self._words: NDArray[np.uint32] = np.zeros(kernels.WORDS, np.uint32)
        self._words[:12] = np.frombuffer(_CONSTANTS + key, "<u4")
        self._words[-1] = 16  # no word is left of the block before the first
        long = kernels.next_uint64.address
        self._bits = _Bits(
            self._words.ctypes.data, long, kernels.next_uint32.address, kernels.next_double.address, long
        )
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.capsule: Any = new(ctypes.addressof(self._bits), self._name, None)
        self.lock = threading.Lock()


def fresh() -> np.random.Generator:
    """A stream of its own at every call."""
    return np.random.Generator(ChaCha20(os.urandom(32)))  # type: ignore[arg-type]
