"""Optimizers: N steps, a trip through a checkpoint, M steps equal N + M to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keel.errors import RunError
from keel.runs.checkpoint import load_latest, save
from keel.runs.state import flatten_optimizer, restore_optimizer


def model(width: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))


def adamw(net: nn.Module, **options: Any) -> torch.optim.AdamW:
    bias = [p for n, p in net.named_parameters() if "bias" in n]
    weight = [p for n, p in net.named_parameters() if "weight" in n]
    groups = [{"params": weight, "weight_decay": 0.1}, {"params": bias, "lr": 1 / 3}]
    return torch.optim.AdamW(groups, lr=0.1 + 0.2, betas=(0.9, 0.95), eps=1e-5, **options)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 0.97


def test_flat_names_by_hand():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.5, betas=(0.5, 0.75), weight_decay=0.0)
    assert flatten_optimizer(optimizer)[0] == {}
    weight.grad = torch.tensor([2.0, 4.0])
    optimizer.step()
    tensors, state = flatten_optimizer(optimizer)
    assert sorted(tensors) == ["0.exp_avg", "0.exp_avg_sq", "0.step"] == state["tensors"]
    # (1 - 0.5) g and (1 - 0.75) g^2
    assert tensors["0.exp_avg"].tolist() == [1.0, 2.0] and tensors["0.exp_avg_sq"].tolist() == [1.0, 4.0]
    assert tensors["0.step"].item() == 1.0
    assert state["class"] == "AdamW" and state["groups"][0]["lr"] == 0.5 and state["groups"][0]["params"] == [0]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_n_then_m_through_a_checkpoint_is_n_plus_m(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype):
    whole, optimizer = model(), None
    optimizer = adamw(whole.to(dtype), **options)
    forward = whole.forward
    whole.forward = lambda x: forward(x.to(dtype))  # type: ignore[method-assign]
    for seed in range(7):
        if seed == 4:
            tensors, state = flatten_optimizer(optimizer)
            weights = {f"model.{k}": v for k, v in whole.state_dict().items()}
            save(tmp_path, 4, {**tensors, **weights}, {"optimizer": state})
        step(whole, optimizer, seed)

    found = load_latest(tmp_path)
    assert found is not None
    resumed = model().to(dtype)
    resumed.load_state_dict({k[6:]: v for k, v in found.tensors.items() if k.startswith("model.")})
    plain = resumed.forward
    resumed.forward = lambda x: plain(x.to(dtype))  # type: ignore[method-assign]
    again = adamw(resumed, **options)
    moments = {k: v for k, v in found.tensors.items() if not k.startswith("model.")}
    copies = {k: v.clone() for k, v in moments.items()}
    restore_optimizer(again, moments, found.state["optimizer"])
    for seed in range(4, 7):
        step(resumed, again, seed)

    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    (left, left_state), (right, right_state) = flatten_optimizer(optimizer), flatten_optimizer(again)
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    assert left_state == right_state  # learning rates to the last bit, tuples as tuples
    assert all(torch.equal(moments[k], copies[k]) for k in copies)  # the checkpoint's tensors are not the optimizer's


def test_momentum_and_values_that_are_no_tensors():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step(net, optimizer, 0)
    optimizer.state[next(net.parameters())]["note"] = 7
    tensors, state = flatten_optimizer(optimizer)
    assert state["values"] == {"0.note": 7}
    other = torch.optim.SGD(model().parameters(), lr=0.5, momentum=0.9)
    restore_optimizer(other, tensors, state)
    assert flatten_optimizer(other)[1] == state


def saved() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    net = model()
    optimizer = adamw(net)
    step(net, optimizer, 0)
    return flatten_optimizer(optimizer)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    tensors, state = saved()
    wrong: list[tuple[str, dict[str, torch.Tensor], dict[str, Any]]] = [
        (r"missing \['1.exp_avg'\]", {k: v for k, v in tensors.items() if k != "1.exp_avg"}, state),
        (r"unexpected \['9.x'\]", {**tensors, "9.x": torch.zeros(1)}, state),
        ("SGD in the checkpoint, AdamW now", tensors, {**state, "class": "SGD"}),
        ("number of parameter groups: 1", tensors, {**state, "groups": state["groups"][:1]}),
        (r"keys of parameter group 0.*unexpected \['initial_lr'\]", tensors, {**state}),
        ("params of parameter group 1", tensors, {**state}),
        (
            r"1.exp_avg has the shape \(2, 3\), its parameter \(1, 3\)",
            {**tensors, "1.exp_avg": torch.zeros(2, 3)},
            state,
        ),
        ("9.x belongs to no parameter", tensors, {**state, "values": {"9.x": 1}}),
        ("None in the checkpoint", {}, {}),
    ]
    first, second = state["groups"]
    wrong[4][2]["groups"] = [{**first, "initial_lr": 1.0}, second]
    wrong[5][2]["groups"] = [first, {**second, "params": [2, 3, 4]}]
    for reason, some_tensors, some_state in wrong:
        net = model()
        optimizer = adamw(net)
        step(net, optimizer, 5)
        before = {k: v.clone() for k, v in flatten_optimizer(optimizer)[0].items()}
        with pytest.raises(RunError, match=reason):
            restore_optimizer(optimizer, some_tensors, some_state)
        after = flatten_optimizer(optimizer)[0]
        assert all(torch.equal(before[k], after[k]) for k in before)


def test_a_model_of_another_width_is_refused():
    tensors, state = saved()
    with pytest.raises(RunError, match="has the shape"):
        restore_optimizer(adamw(model(width=4)), tensors, state)
