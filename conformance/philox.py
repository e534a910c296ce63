"""Where every random bit of the harness comes from: the counter-based generator Philox-4x32-10, in NumPy.

A word is a pure function of (counter, key): any part of any array can be made anywhere, without state, on any version
of NumPy. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. May touch: NumPy.
Tests: tests/conformance/test_philox.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float64, UInt32, UInt64
from numpy.typing import ArrayLike

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
# Added to the key after each round: the golden ratio and sqrt(3) - 1, as fractions of 2**32.
_WEYL_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_32_BITS = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
# Counters worked on at once: their intermediate arrays stay in a core's cache, which is two to three times as fast.
_BLOCK = 8192
# Four fields, each uniform on 0 … 65535: mean 4 · 65535 / 2, variance 4 · (65536² − 1) / 12.
_SUM_MEAN = 131070
_PER_STANDARD_DEVIATION = 1.0 / 37837.22723720648

Item = TypeVar("Item")


def philox_words(counter: Sequence[ArrayLike], key: tuple[int, int]) -> tuple[UInt32[np.ndarray, "..."], ...]:
    """Four arrays of random 32-bit words for four counter words of any shapes that broadcast, each from 0 to 2**32 - 1.

    Same numbers as Random123's `philox4x32` (its known answers are in the tests).
    """
    words = np.broadcast_arrays(*[np.asarray(word, dtype=np.uint64) for word in counter])
    flat = [word.reshape(-1) for word in words]
    output = [np.empty(flat[0].size, np.uint32) for _ in flat]
    for start in range(0, flat[0].size, _BLOCK):
        block = slice(start, start + _BLOCK)
        for whole, part in zip(output, _rounds([word[block] for word in flat], key), strict=True):
            whole[block] = part
    return tuple(whole.reshape(words[0].shape) for whole in output)


def _rounds(words: list[UInt64[np.ndarray, " block"]], key: tuple[int, int]) -> list[UInt64[np.ndarray, " block"]]:
    for round_index in range(ROUNDS):
        round_key = [
            np.uint64((word + round_index * step) % 2**32) for word, step in zip(key, _WEYL_STEPS, strict=True)
        ]
        products = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (products[1] >> _SHIFT_32) ^ words[1] ^ round_key[0],
            products[1] & _LOW_32_BITS,
            (products[0] >> _SHIFT_32) ^ words[3] ^ round_key[1],
            products[0] & _LOW_32_BITS,
        ]
    return words


def standard_values(
    num_features: int, counter: tuple[ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]
) -> Float64[np.ndarray, "... features"]:
    """Random values of mean 0 and standard deviation 1, within ±3.47, one for each feature of each counter.

    `counter` holds the three upper words; the lowest is feature // 2, as four words make two values. A value is the
    centred sum of four 16-bit fields (Irwin-Hall) times a constant: one float64 product, which no libm rounds.
    """
    pairs = np.arange((num_features + 1) // 2, dtype=np.uint64)
    upper = [np.asarray(word, dtype=np.uint64)[..., None] for word in counter]
    words = philox_words((pairs, *upper), key)
    sums = [_sum_of_fields(words[0]) + _sum_of_fields(words[1]), _sum_of_fields(words[2]) + _sum_of_fields(words[3])]
    interleaved = np.stack(sums, axis=-1).reshape(*sums[0].shape[:-1], -1)[..., :num_features]
    return (interleaved - _SUM_MEAN) * _PER_STANDARD_DEVIATION


def _sum_of_fields(words: UInt32[np.ndarray, "..."]) -> np.ndarray:
    """int64: the upper half of each word plus its lower half."""
    return (words >> np.uint32(16)).astype(np.int64) + (words & np.uint32(0xFFFF))


class Draws:
    """A sequence of draws for decisions (which level, where to cut); equal keys give equal sequences on any machine.

    `key` is any number of integers; two sequences with different keys have nothing to do with each other.
    """

    def __init__(self, *key: int) -> None:
        self._key = _hash_key(key)
        self._next_block = 0
        self._words: list[int] = []

    def below(self, bound: int) -> int:
        """An integer from 0 to bound - 1, uniform up to bound / 2**32."""
        if not self._words:
            self._refill()
        return self._words.pop() * bound >> 32

    def choice(self, items: Sequence[Item]) -> Item:
        """One of `items`, each as likely."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items in random order; all of them, shuffled, where `count` is their number."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def _refill(self) -> None:
        block = np.arange(self._next_block, self._next_block + 64, dtype=np.uint64)
        self._next_block += 64
        words = philox_words((block, 0, 0, 0), self._key)
        self._words = np.stack(words, axis=-1).reshape(-1)[::-1].tolist()


def _hash_key(parts: Sequence[int]) -> tuple[int, int]:
    """Any number of integers as one key of two words, by chaining: each block's output is the next one's key."""
    key = (len(parts), 0)
    for part in parts:
        words = philox_words((part % 2**32, part // 2**32 % 2**32, 0, 0), key)
        key = int(words[0]), int(words[1])
    return key
