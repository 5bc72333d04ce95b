"""Memory of gradients that are done with, for the next ones of the same shape.

The system gives new memory page by page, each cleared first. For the gradients of a large model that takes as long as
a good part of the products that fill them, and they come and go with every minibatch (docs/decisions.md).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LARGE = 1 << 17
"""Numbers from which on a gradient's memory is kept: what is smaller the allocator keeps by itself."""

Key = tuple[torch.dtype, torch.Size]


class _Kept:
    """places: what is free, by dtype and shape. wanted: what was asked for, or None outside `kept`."""

    def __init__(self):
        self.places: defaultdict[Key, list[Tensor]] = defaultdict(list)
        self.wanted: set[Key] | None = None


_kept = _Kept()


@contextmanager
def kept() -> Iterator[None]:
    """Within, the memory of gradients that `release` takes away is used again; at the end the system has it back."""
    _kept.wanted = set()
    try:
        yield
    finally:
        _kept.wanted = None
        _kept.places.clear()


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Takes the gradients away. Memory that nobody asked for, as where autograd makes them, is not kept."""
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and _kept.wanted and (key := (gradient.dtype, gradient.shape)) in _kept.wanted:
            _kept.places[key].append(gradient)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, a gradient of [rows of a, columns of b]."""
    place = _taken((a.dtype, torch.Size((a.shape[0], b.shape[1]))), a.device)
    return a @ b if place is None else torch.mm(a, b, out=place)


def zeros_like(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient of the weight to be added to."""
    place = _taken((dtype, weight.shape), weight.device)
    return torch.zeros_like(weight, dtype=dtype) if place is None else place.zero_()


def _taken(key: Key, device: torch.device) -> Tensor | None:
    if _kept.wanted is None or device.type != "cpu" or key[1].numel() < LARGE:
        return None
    _kept.wanted.add(key)
    try:
        return _kept.places[key].pop()
    except IndexError:
        return None
