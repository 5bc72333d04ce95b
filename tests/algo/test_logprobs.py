import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.algo.logprobs import token_logprobs

N, V, H = 37, 101, 8


@pytest.fixture
def inputs():
    def make(dtype=torch.float32, bias=True):
        hidden = torch.randn(N, H).to(dtype).requires_grad_()
        weight = torch.randn(V, H).to(dtype).requires_grad_()
        return hidden, weight, torch.randn(V).to(dtype).requires_grad_() if bias else None, torch.randint(V, (N,))

    return make


def chunked(tensors, temperature, chunk=1024):
    hidden, weight, bias, ids = tensors
    return token_logprobs(hidden, weight, bias, ids, temperature, chunk)


def whole(tensors, temperature):
    hidden, weight, bias, ids = tensors
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    logprobs = logits.log_softmax(1)
    return logprobs.gather(1, ids[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


def test_by_hand():
    # One hidden unit of 1: logits 0, log 2, log 5 with the bias; probabilities 1/8, 2/8, 5/8
    weight, bias = torch.tensor([[0.0], [math.log(2)], [0.0]]), torch.tensor([0.0, 0.0, math.log(5)])
    logprobs, entropy = token_logprobs(torch.ones(2, 1), weight, bias, torch.tensor([1, 2]), 1.0)
    torch.testing.assert_close(logprobs, torch.tensor([2 / 8, 5 / 8]).log())
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    torch.testing.assert_close(entropy, torch.full((2,), expected))
    # At temperature 0.5 odds are squared: 1, 4, 25
    torch.testing.assert_close(
        token_logprobs(torch.ones(1, 1), weight, bias, torch.tensor([1]), 0.5)[0], torch.tensor([4 / 30]).log()
    )


@pytest.mark.parametrize("chunk", [1, 5, N - 1, N, 1024])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_whole_softmax(inputs, chunk, bias):
    tensors = inputs(bias=bias)
    leaves = [x for x in tensors[:3] if x is not None]
    upstream = torch.randn(N)
    expected = whole(tensors, 0.7)
    actual = chunked(tensors, 0.7, chunk)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert not actual[1].requires_grad
    for mine, other in zip(
        torch.autograd.grad(actual[0], leaves, upstream),
        torch.autograd.grad(expected[0], leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_only_what_requires_a_gradient_gets_one(inputs, trained):
    tensors = list(inputs())
    for i in {0, 1, 2} - {trained}:
        tensors[i].requires_grad_(False)
    upstream = torch.randn(N)
    (mine,) = torch.autograd.grad(chunked(tensors, 1.0, 10)[0], tensors[trained], upstream)
    (other,) = torch.autograd.grad(whole(tensors, 1.0)[0], tensors[trained], upstream)
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_bfloat16_multiplies_in_its_dtype_and_goes_on_in_float32(inputs):
    tensors = inputs(torch.bfloat16)
    actual, expected = chunked(tensors, 0.7, 10), whole(tensors, 0.7)
    assert actual[0].dtype == actual[1].dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(actual[0].sum(), tensors[:3])
    other = torch.autograd.grad(expected[0].sum(), tensors[:3])
    for a, b in zip(mine, other, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.02)


def test_autocast_changes_neither_values_nor_gradients(inputs):
    tensors = inputs()
    plain = chunked(tensors, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = chunked(tensors, 1.0)
    assert torch.equal(plain[0], cast[0])
    for a, b in zip(
        torch.autograd.grad(plain[0].sum(), tensors[:3]), torch.autograd.grad(cast[0].sum(), tensors[:3]), strict=True
    ):
        assert torch.equal(a, b)


def test_inference_mode_inside_and_outside(inputs):
    hidden, weight, bias, ids = inputs()
    expected = token_logprobs(hidden, weight, bias, ids, 1.0)
    with torch.inference_mode():
        made = hidden * 1.0
        inside = token_logprobs(made, weight, bias, ids, 1.0)
    outside = token_logprobs(made, weight.detach(), None if bias is None else bias.detach(), ids, 1.0)
    assert torch.equal(inside[0], expected[0].detach()) and torch.equal(outside[0], expected[0].detach())


def test_no_rows_and_extreme_logits():
    assert [len(x) for x in token_logprobs(torch.ones(0, 2), torch.ones(3, 2), None, torch.ones(0).long(), 1.0)] == [
        0,
        0,
    ]
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, torch.tensor([[1.0], [-1.0]]), None, torch.tensor([1, 1]), 1.0)
    logprobs.sum().backward()
    assert torch.equal(logprobs, torch.tensor([-2e4, 0.0])) and torch.equal(entropy, torch.zeros(2))
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.tensor([[-2.0], [0.0]]))


def test_an_id_outside_the_vocabulary_is_refused(inputs):
    hidden, weight, bias, _ = inputs()
    with pytest.raises((IndexError, RuntimeError)):
        token_logprobs(hidden, weight, bias, torch.full((N,), V), 1.0)


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation makes."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen = max([self.seen, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
        return result


def test_no_tensor_of_rows_times_vocabulary_is_saved_or_made(inputs):
    tensors = inputs()
    chunk = 8
    saved: list[torch.Tensor] = []

    def pack(x):
        saved.append(x)
        return x

    for function, small in [
        (lambda: chunked(tensors, 1.0, chunk), True),
        (lambda: whole(tensors, 1.0), False),
    ]:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Largest() as largest:
            function()[0].sum().backward()
        assert (max(x.numel() for x in saved) <= max(N * H, V * H)) == small
        assert (largest.seen <= max(chunk * V, N * H, V * H)) == small
