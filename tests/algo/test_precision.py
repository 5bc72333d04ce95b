"""Weights in the dtype that the processor multiplies in."""

import pytest
import torch
from torch.nn.functional import linear

from keel.algo import precision
from keel.algo.precision import blocks, project, weight_as

WEIGHT = torch.arange(12.0, dtype=torch.bfloat16).view(6, 2)


def test_a_weight_of_the_dtype_is_itself():
    assert weight_as(WEIGHT, torch.bfloat16) is WEIGHT


def test_a_weight_in_another_dtype_lies_where_the_next_one_will():
    with torch.inference_mode():  # what was made here serves passes with gradients too
        first = weight_as(WEIGHT, torch.float64)
        assert first.tolist() == WEIGHT.tolist() and first.dtype == torch.float64
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    second = weight_as(WEIGHT[:2] + 1, torch.float64)
    linear(x.detach(), second)
    assert second.tolist() == [[1, 2], [3, 4]] and first.flatten().tolist() == [1, 2, 3, 4, *range(4, 12)]
    assert not second.requires_grad


def test_a_larger_weight_gets_more_room():
    small = weight_as(WEIGHT[:1], torch.float64)
    large = torch.ones(4 * WEIGHT.numel() + 99, dtype=torch.bfloat16)
    assert weight_as(large, torch.float64).sum() == len(large) and small.tolist() == [[0, 1]]


@pytest.mark.parametrize("wide", [True, False])
def test_blocks_cover_all_rows(monkeypatch, wide):
    """In float32 where the processor has no instructions for bfloat16, else as they lie."""
    monkeypatch.setattr(precision, "BLOCK", 4)
    monkeypatch.setattr(precision, "_has_bfloat16", lambda: not wide)
    found = [(rows, block.tolist(), block.dtype, block.data_ptr()) for rows, block in blocks(WEIGHT)]
    dtype = torch.float32 if wide else torch.bfloat16
    assert [f[:3] for f in found] == [
        (slice(0, 4), WEIGHT[:4].tolist(), dtype),
        (slice(4, 6), WEIGHT[4:].tolist(), dtype),
    ]
    places = [f[3] for f in found]
    assert places[0] == places[1] if wide else places == [WEIGHT.data_ptr(), WEIGHT[4:].data_ptr()]


@pytest.mark.parametrize("large", [12, 13])
@pytest.mark.parametrize("bias", [torch.tensor([1.0, 2, 3, 4, 5, 6]), None])
def test_the_vocabulary_either_way_round(monkeypatch, large, bias):
    monkeypatch.setattr(precision, "LARGE", large)
    x = torch.tensor([[1.0, -1], [2, 0]])
    expected = torch.tensor([[-1.0] * 6, [0, 4, 8, 12, 16, 20]]) + (0 if bias is None else bias)
    got = project(x, WEIGHT.float(), bias)
    assert torch.equal(got, expected) and got.is_contiguous()


@pytest.mark.parametrize(("large", "turned"), [(12, True), (13, False)])
def test_only_a_weight_that_no_cache_holds_is_turned_round(monkeypatch, large, turned):
    """A small one is slower that way."""
    monkeypatch.setattr(precision, "LARGE", large)
    called = []
    monkeypatch.setattr(precision, "linear", lambda *given: called.append(1) or linear(*given))
    project(torch.ones(1, 2), WEIGHT.float(), None)
    assert bool(called) != turned
