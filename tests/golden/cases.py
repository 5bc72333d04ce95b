"""A file of peers' numbers as tensors, for every test of this folder (README of the folder of --peer-numbers)."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CASES = 24


class Case:
    """One file: `case["in.mask"]` is a float32 tensor, `case.number("in.gamma")` a float."""

    def __init__(self, path: Path):
        self.arrays = dict(np.load(path))
        self.mask = self["in.mask"].bool()
        self.count = self.mask.sum()

    def __getitem__(self, key: str) -> Tensor:
        return torch.as_tensor(self.arrays[key], dtype=torch.float32)

    def number(self, key: str) -> float:
        return float(self.arrays[key])


def same(actual: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        actual, expected = actual[mask], expected[mask]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
