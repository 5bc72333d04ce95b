"""Memory of gradients that is used again: the same numbers, no more memory than one set of gradients, nothing left."""

import pytest
import torch
from torch import nn

from keel.models import spare

A, B = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 1.0, 3.0]])
AB = torch.tensor([[1.0, 2.0, 4.0, 7.0], [3.0, 4.0, 10.0, 15.0], [5.0, 6.0, 16.0, 23.0]])


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(spare, "LARGE", 0)


def parameter_with(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def test_a_released_gradient_is_the_place_of_the_next_one():
    with spare.kept():
        first = spare.product(A, B)
        place = first.data_ptr()
        spare.release([parameter := parameter_with(first)])
        assert parameter.grad is None
        again, another = spare.product(A, B), spare.product(A, B)
        assert again.data_ptr() == place != another.data_ptr()
        assert again.equal(AB) and another.equal(AB)
        assert spare.zeros_like(torch.ones(2, 2), torch.float32).equal(torch.zeros(2, 2))
        spare.release([parameter_with(again)])
        zeros = spare.zeros_like(parameter, torch.float32)
        assert zeros.data_ptr() == place and zeros.equal(torch.zeros(3, 4))
        assert not spare._kept.places[torch.float32, zeros.shape], "what is in use is not free"
        spare.release([parameter_with(zeros)])
    assert not spare._kept.places
    assert spare.product(A, B).equal(AB)


def test_what_nobody_asked_for_is_not_kept():
    spare.release([parameter_with(A.clone())])  # outside of `kept`
    with spare.kept():
        spare.release([parameter_with(A.clone()), parameter_with(AB.to(torch.bfloat16)), nn.Parameter(A)])
        assert not any(spare._kept.places.values())
        assert spare.product(A, B).dtype == torch.float32


def test_memory_is_given_back_where_the_update_fails():
    with pytest.raises(ValueError, match="here"), spare.kept():
        spare.release([parameter_with(spare.product(A, B))])
        assert sum(map(len, spare._kept.places.values())) == 1
        raise ValueError("here")
    assert not spare._kept.places and spare._kept.wanted is None
