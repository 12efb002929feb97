"""Seeds of samples: a client's own, or a stream of them from the server's seed. Pure and repeatable."""

from __future__ import annotations

SEED_BITS = 63
_MASK64 = (1 << 64) - 1
_MASK = (1 << SEED_BITS) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(seed: int, number: int) -> int:
    """A seed in ``[0, 2**63)``, unrelated for every ``number``: one step of splitmix64 (Steele et al., 2014)."""
    value = (seed + (number + 1) * _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (value ^ (value >> 31)) & _MASK


class SeedCounter:
    """Seeds for requests that bring none. One thread."""

    def __init__(self, seed: int, life: int) -> None:
        self._base = mix(seed, life)
        self._count = 0

    def next(self) -> int:
        """A new seed."""
        self._count += 1
        return mix(self._base, self._count)


def sample_seeds(seed: int, count: int) -> list[int]:
    """Seeds of ``count`` samples of one prompt; the first is ``seed``, so ``n`` leaves the first choice alone."""
    return [seed & _MASK, *(mix(seed & _MASK, k) for k in range(1, count))]
