"""Sampling noise drawn from a counter, so that a response does not depend on who shares its batch.

Each number is a hash of (seed, step, sample, position): splitmix64 (Steele, Lea, Flood 2014, "Fast splittable
pseudorandom number generators", figure 15) over the four words in turn.
"""

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(words: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        words = words + _GAMMA
        words = (words ^ (words >> np.uint64(30))) * _MIX1
        words = (words ^ (words >> np.uint64(27))) * _MIX2
        return words ^ (words >> np.uint64(31))


def sample_keys(seed: int, step: int, samples: np.ndarray) -> np.ndarray:
    """One key per sample number: [B] uint64."""
    state = _mix(_mix(np.array([seed], dtype=np.uint64)) ^ np.uint64(step))
    return _mix(state ^ samples.astype(np.uint64))


def uniforms(keys_B: np.ndarray, position: int) -> np.ndarray:
    """Numbers in [0, 1) with 53 random bits, for one position of each sample: [B] float64."""
    return (_mix(keys_B ^ np.uint64(position)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
