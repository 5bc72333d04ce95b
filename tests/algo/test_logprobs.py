import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.algo.kl import k3
from keel.algo.logprobs import exact_kl, token_logprobs

N, V, H = 37, 101, 8


@pytest.fixture
def inputs():
    def make(dtype=torch.float32, bias=True):
        hidden = torch.randn(N, H).to(dtype).requires_grad_()
        weight = torch.randn(V, H).to(dtype).requires_grad_()
        return hidden, weight, torch.randn(V).to(dtype).requires_grad_() if bias else None, torch.randint(V, (N,))

    return make


def chunked(tensors, temperature, at_once=1 << 20):
    hidden, weight, bias, ids = tensors
    return token_logprobs(hidden, weight, bias, ids, temperature, at_once)


def whole(tensors, temperature, wide=False):
    hidden, weight, bias, ids = (x.float() if wide and x.is_floating_point() else x for x in tensors)
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / temperature
    logprobs = logits.log_softmax(1)
    return logprobs.gather(1, ids[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(1)


@pytest.fixture
def reference():
    """Hidden states of another width, output embedding and bias of a reference."""
    return torch.randn(N, H - 2), torch.randn(V, H - 2) / 2, torch.randn(V)


def chunked_kl(tensors, reference, temperature, at_once=1 << 20):
    (hidden, weight, bias, *_), (ref_hidden, ref_weight, ref_bias) = tensors, reference
    return exact_kl(hidden, weight, bias, ref_hidden, ref_weight, ref_bias, temperature, at_once)


def whole_kl(tensors, reference, temperature, wide=False):
    own = [x.float() if wide else x for x in tensors[:3]]
    logprobs, ref_logprobs = (
        (torch.nn.functional.linear(*x).float() / temperature).log_softmax(1) for x in (own, reference)
    )
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(1)


def test_by_hand():
    # One hidden unit of 1: logits 0, log 2, log 5 with the bias; probabilities 1/8, 2/8, 5/8
    weight, bias = torch.tensor([[0.0], [math.log(2)], [0.0]]), torch.tensor([0.0, 0.0, math.log(5)])
    logprobs, entropy = token_logprobs(torch.ones(2, 1), weight, bias, torch.tensor([1, 2]), 1.0)
    torch.testing.assert_close(logprobs, torch.tensor([2 / 8, 5 / 8]).log())
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    torch.testing.assert_close(entropy, torch.full((2,), expected))
    # d entropy / d logit = -p (log p + entropy)
    bias.requires_grad_()
    token_logprobs(torch.ones(1, 1), weight, bias, torch.tensor([1]), 1.0)[1].sum().backward()
    assert bias.grad is not None
    slopes = [-p * (math.log(p) + expected) for p in (1 / 8, 2 / 8, 5 / 8)]
    torch.testing.assert_close(bias.grad, torch.tensor(slopes))
    # At temperature 0.5 odds are squared: 1, 4, 25
    torch.testing.assert_close(
        token_logprobs(torch.ones(1, 1), weight, bias, torch.tensor([1]), 0.5)[0], torch.tensor([4 / 30]).log()
    )


@pytest.fixture(params=[1, 20, 101, 2048], ids="block {}".format)
def block(request, monkeypatch):
    """Columns of the vocabulary that are worked on at a time."""
    monkeypatch.setattr("keel.algo.precision.BLOCK", request.param)


@pytest.mark.parametrize("at_once", [1, 5 * V, (N - 1) * V, N * V, 1 << 20])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_whole_softmax(inputs, at_once, bias, block):
    tensors = inputs(bias=bias)
    leaves = [x for x in tensors[:3] if x is not None]
    upstream = torch.randn(2, N)
    expected = whole(tensors, 0.7)
    actual = chunked(tensors, 0.7, at_once)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    # Of the log-probabilities alone, of the entropy alone, and of both.
    for used in ([0], [1], [0, 1]):
        mine, other = (
            torch.autograd.grad([x[i] for i in used], leaves, [upstream[i] for i in used], retain_graph=True)
            for x in (actual, expected)
        )
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trained", [0, 1, 2])
@pytest.mark.parametrize("output", [0, 1])
def test_only_what_requires_a_gradient_gets_one(inputs, trained, output):
    tensors = list(inputs())
    for i in {0, 1, 2} - {trained}:
        tensors[i].requires_grad_(False)
    upstream = torch.randn(N)
    (mine,) = torch.autograd.grad(chunked(tensors, 1.0, 10 * V)[output], tensors[trained], upstream)
    (other,) = torch.autograd.grad(whole(tensors, 1.0)[output], tensors[trained], upstream)
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=[True, False])
def unit(request, monkeypatch):
    """Whether the processor has instructions for bfloat16; without, blocks of the weight are multiplied in float32."""
    monkeypatch.setattr("keel.algo.precision._has_bfloat16", lambda: request.param)
    monkeypatch.setattr("keel.algo.precision.BLOCK", 5)
    return request.param


def test_bfloat16_multiplies_in_its_dtype_and_goes_on_in_float32(inputs, unit):
    tensors = inputs(torch.bfloat16)
    actual, expected = chunked(tensors, 0.7, 10 * V), whole(tensors, 0.7, wide=not unit)
    assert actual[0].dtype == actual[1].dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    mine = torch.autograd.grad(actual[0].sum() + actual[1].sum(), tensors[:3])
    other = torch.autograd.grad(expected[0].sum() + expected[1].sum(), tensors[:3])
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


@pytest.mark.parametrize("columns", [1, 2])
def test_no_rows_and_extreme_logits(columns, monkeypatch):
    monkeypatch.setattr("keel.algo.precision.BLOCK", columns)
    assert [len(x) for x in token_logprobs(torch.ones(0, 2), torch.ones(3, 2), None, torch.ones(0).long(), 1.0)] == [
        0,
        0,
    ]
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, torch.tensor([[1.0], [-1.0]]), None, torch.tensor([1, 1]), 1.0)
    assert torch.equal(entropy, torch.zeros(2))
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(logprobs, torch.tensor([-2e4, 0.0])) and torch.equal(entropy, torch.zeros(2))
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.tensor([[-2.0], [0.0]]))


def test_an_id_outside_the_vocabulary_is_refused(inputs):
    hidden, weight, bias, _ = inputs()
    with pytest.raises((IndexError, RuntimeError)):
        token_logprobs(hidden, weight, bias, torch.full((N,), V), 1.0)


class Work(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, and how many operations make [N, V] tensors."""

    def __init__(self):
        super().__init__()
        self.largest, self.whole = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = max((x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)), default=0)
        self.largest = max(self.largest, made)
        self.whole += made == N * V
        return result


def test_no_tensor_of_rows_times_vocabulary_is_saved_or_made(inputs, reference):
    """Case 52."""
    tensors = inputs()
    chunk = 8
    saved: list[torch.Tensor] = []

    def pack(x):
        saved.append(x)
        return x

    for function, small in [
        (lambda: chunked(tensors, 1.0, chunk * V), True),
        (lambda: whole(tensors, 1.0), False),
        (lambda: [chunked_kl(tensors, reference, 1.0, chunk * V)], True),
        (lambda: [whole_kl(tensors, reference, 1.0)], False),
    ]:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Work() as work:
            torch.stack([x.sum() for x in function()]).sum().backward()
        assert (max(x.numel() for x in saved) <= max(N * H, V * H)) == small
        assert (work.largest <= max(chunk * V, N * H, V * H)) == small


def test_an_entropy_that_nothing_is_made_of_costs_nothing_in_backward(inputs):
    tensors = inputs()

    def cost(used):
        outputs = chunked(tensors, 1.0)
        total = torch.stack([outputs[i].sum() for i in used]).sum()
        with Work() as work:
            total.backward()
        return work.whole

    # With a gradient of zeros in place of none the two would be equal.
    assert cost([0]) < cost([0, 1])


def test_exact_kl_by_hand():
    # Policy 1/8, 2/8, 5/8 against 2/8, 2/8, 4/8; at temperature 0.5 1/30, 4/30, 25/30 against 1/6, 1/6, 4/6.
    weight, policy = torch.zeros(3, 1), torch.tensor([1.0, 2.0, 5.0]).log().requires_grad_()
    ref = torch.tensor([2.0, 2.0, 4.0]).log()
    both = (torch.ones(1, 1), weight, policy), (torch.ones(1, 1), weight, ref)
    kl = chunked_kl(*both, 1.0)
    expected = 1 / 8 * math.log(1 / 2) + 5 / 8 * math.log(5 / 4)
    assert kl.item() == pytest.approx(expected)
    (slope,) = torch.autograd.grad(kl.sum(), policy)
    parts = [p * (math.log(p / q) - expected) for p, q in ((1 / 8, 1 / 4), (1 / 4, 1 / 4), (5 / 8, 1 / 2))]
    torch.testing.assert_close(slope, torch.tensor(parts))
    expected = 1 / 30 * math.log(6 / 30) + 4 / 30 * math.log(24 / 30) + 25 / 30 * math.log(25 / 20)
    assert chunked_kl(*both, 0.5).item() == pytest.approx(expected)


@pytest.mark.parametrize("at_once", [1, 5 * V, N * V, 1 << 20])
@pytest.mark.parametrize("bias", [True, False])
def test_exact_kl_and_its_gradient_are_those_of_the_whole_softmax(inputs, reference, at_once, bias, block):
    tensors = inputs(bias=bias)
    leaves = [x for x in tensors[:3] if x is not None]
    upstream = torch.randn(N)
    actual = chunked_kl(tensors, reference, 1.5, at_once)
    expected = whole_kl(tensors, reference, 1.5)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    mine, other = (torch.autograd.grad(x, leaves, upstream) for x in (actual, expected))
    torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_exact_kl_is_what_sampled_tokens_estimate(inputs, reference):
    hidden, weight, bias, _ = (x.detach() / 4 for x in inputs())
    # Every token at every row, weighted by its probability.
    ref_hidden, ref_weight, ref_bias = reference
    total = torch.zeros(N)
    for token in range(V):
        ids = torch.full((N,), token)
        logprobs, _ = token_logprobs(hidden, weight, bias, ids, 0.7)
        ref_logprobs, _ = token_logprobs(ref_hidden, ref_weight, ref_bias, ids, 0.7)
        total += logprobs.exp() * k3(logprobs, ref_logprobs, math.inf)
    torch.testing.assert_close(chunked_kl((hidden, weight, bias), reference, 0.7), total, atol=1e-5, rtol=1e-5)


def test_exact_kl_is_never_negative_and_0_at_the_reference(inputs):
    hidden, weight, bias, _ = inputs()
    kl = exact_kl(hidden, weight, bias, hidden.detach(), weight.detach(), bias.detach(), 1.0)
    assert not kl.any()
    kl.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any() and not weight.grad.any()
    # A hair beside it, where rounding decides the sign of a plain sum.
    near = exact_kl(hidden, weight, bias, hidden.detach() * (1 + 1e-7), weight.detach(), bias.detach(), 1.0)
    assert (near >= 0).all() and near.max() < 1e-5


def test_exact_kl_gives_the_reference_no_gradient(inputs, reference):
    tensors = inputs()
    for x in reference:
        x.requires_grad_()
    chunked_kl(tensors, reference, 1.0).sum().backward()
    assert all(x.grad is None for x in reference) and all(x.grad is not None for x in tensors[:3])


def test_exact_kl_in_bfloat16_and_under_autocast(inputs, reference, unit):
    tensors = inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        actual = chunked_kl(tensors, reference, 0.7, 10 * V)
    expected = whole_kl(tensors, reference, 0.7, wide=not unit)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for a, b in zip(*(torch.autograd.grad(x.sum(), tensors[:3]) for x in (actual, expected)), strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.02)


def test_exact_kl_of_no_rows_and_extreme_logits():
    nothing = torch.ones(0, 2), torch.ones(3, 2), None
    assert len(chunked_kl(nothing, nothing, 1.0)) == 0
    weight = torch.tensor([[1.0], [-1.0]])
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    kl = exact_kl(hidden, weight, None, torch.tensor([[-1e4], [-1e4]]), weight, None, 1.0)
    kl.sum().backward()
    assert kl.tolist() == [2e4, 0.0] and hidden.grad is not None and hidden.grad.isfinite().all()
