"""In which dtype a processor multiplies weights of bfloat16: in float32, where its own way would be slower."""

import functools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

BLOCK = 2048
"""Rows of the vocabulary's weight that are worked on at a time: few enough to stay in the processor's caches."""

FEW, LARGE = 64, 1 << 24
"""Rows up to which a float32 product is faster the other way round, with a weight of at least so many numbers, which no
cache holds (docs/decisions.md)."""


@functools.cache
def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """On a CPU, that of a pass over many tokens, products and what is between them: float32 for bfloat16 weights where
    the processor has no matrix unit for bfloat16. There its products take twice the time of float32's, more than the
    casts of the weights cost."""
    slow = dtype == torch.bfloat16 and not torch.cpu.get_capabilities().get("amx_bf16", False)
    return torch.float32 if slow else dtype


def emulated(weight: Tensor) -> bool:
    """Whether products of this tensor, also with few columns, go through instructions of another dtype: bfloat16 on a
    processor that has none for it at all. torch then takes ten times what float32 takes, so that a copy of the weight,
    made in parts, costs less."""
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not _has_bfloat16()


def weight_as(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in a dtype; where that is another one, in memory that this thread's next call writes over."""
    if weight.dtype == dtype:
        return weight
    if dtype not in _held.casts or _held.casts[dtype].numel() < weight.numel():
        with torch.inference_mode(False):  # so that it serves passes with and without gradients
            _held.casts[dtype] = torch.empty(weight.numel(), dtype=dtype)
    with torch.no_grad():
        return _held.casts[dtype][: weight.numel()].view(weight.shape).copy_(weight)


class _Held(threading.local):
    def __init__(self):
        self.casts: dict[torch.dtype, Tensor] = {}


_held = _Held()


def project(x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """x W^T + bias of a weight with very many rows, the vocabulary's: [N, V], in float32 where the weight's dtype is
    emulated, else in the dtype of both."""
    if not emulated(weight_VH):
        on_cpu = x_NH.device.type == "cpu" and x_NH.dtype == torch.float32
        if on_cpu and bias_V is None and len(x_NH) <= FEW and weight_VH.numel() >= LARGE:
            return torch.mm(weight_VH, x_NH.T).T.contiguous()  # reads the weight as it lies; x W^T would rearrange it
        return linear(x_NH, weight_VH, bias_V)
    out_NV, wide_NH = x_NH.new_empty(len(x_NH), len(weight_VH), dtype=torch.float32), x_NH.float()
    for rows, block in blocks(weight_VH):
        torch.mm(wide_NH, block.T, out=out_NV[:, rows])
    return out_NV if bias_V is None else out_NV.add_(bias_V)


def blocks(weight_VH: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows of a weight in the dtype that it is multiplied in, each valid until the next: where that is not
    its own, all are written to the same place, as memory that is new to the process costs more than the cast."""
    cast, most = emulated(weight_VH), min(BLOCK, len(weight_VH))
    held = weight_VH.new_empty(most, weight_VH.shape[1], dtype=torch.float32) if cast else weight_VH
    for start in range(0, len(weight_VH), BLOCK):
        block = weight_VH[start : start + BLOCK]
        yield slice(start, start + len(block)), held[: len(block)].copy_(block) if cast else block


@functools.cache
def _has_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
