"""Random numbers without state: a uniform draw is a function of (seed, token index, stream).

So a draw does not depend on batch neighbours, on how often a step was retried or on which instance runs it, and all
ranks of a TP group draw the same. The generator is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", 2011), a counter-based generator: key = seed, counter = (token index, stream).
"""

from __future__ import annotations

from enum import IntEnum

_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_ROUNDS = 10


class Stream(IntEnum):
    """What a draw is for. Streams of one token are independent of each other."""

    TARGET = 0  # the token itself, from the target's distribution
    DRAFT = 1  # a proposal, from the draft's distribution
    ACCEPT = 2  # whether a proposal is accepted
    RESIDUAL = 3  # the token instead of a rejected proposal


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32: four 32-bit words."""
    a, b, c, d = counter
    key_a, key_b = key
    for _ in range(_ROUNDS):
        high, low = a * _MULTIPLIER_A, c * _MULTIPLIER_B
        a, b, c, d = (low >> 32) ^ b ^ key_a, low & _MASK, (high >> 32) ^ d ^ key_b, high & _MASK
        key_a, key_b = (key_a + _WEYL_A) & _MASK, (key_b + _WEYL_B) & _MASK
    return a, b, c, d


def uniform(seed: int, token_index: int, stream: Stream) -> float:
    """A number in [0, 1) with 53 random bits. ``seed`` counts modulo 2^64."""
    seed &= (1 << 64) - 1
    counter = (token_index & _MASK, token_index >> 32, int(stream), 0)
    high, low, _, _ = philox(counter, (seed & _MASK, seed >> 32))
    return ((high << 21) | (low >> 11)) * 2.0**-53
