"""In which dtype a processor multiplies weights of bfloat16: in float32, where its own way would be slower."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import linear

BLOCK = 8192
"""Rows of a weight that are held in another dtype at a time (18 MiB of float32 at a width of 576)."""


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


def project(x_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """x W^T + bias of a weight with very many rows, the vocabulary's: [N, V], in float32 where the weight's dtype is
    emulated, else in the dtype of both."""
    if not emulated(weight_VH):
        return linear(x_NH, weight_VH, bias_V)
    out_NV, wide_NH = x_NH.new_empty(len(x_NH), len(weight_VH), dtype=torch.float32), x_NH.float()
    for part_NV, block_VH in zip(out_NV.split(BLOCK, 1), weight_VH.split(BLOCK), strict=True):
        torch.mm(wide_NH, block_VH.float().T, out=part_NV)
    return out_NV if bias_V is None else out_NV.add_(bias_V)


@functools.cache
def _has_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
