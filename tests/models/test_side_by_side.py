"""Parts of a batch at once: same results and gradients in the same order, and an early end leaves nothing running."""

import threading
import time

import pytest
import torch

from keel.data.encode import pad_sequences
from keel.models.roles import micro_group_scores, micro_scores
from keel.models.side_by_side import add_gradients, side_by_side, workers_for
from keel.types import TokenSequence
from tests.tiny import backbone, comparisons


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_parts(threads):
    def work(part: int) -> int:
        time.sleep(0.02 if part == 0 else 0)
        return 10 * part

    assert list(side_by_side(work, range(5), 2)) == [0, 10, 20, 30, 40]
    assert torch.get_num_threads() == threads


def test_a_part_that_is_alone_has_all_cores(threads):
    def count(_: int) -> int:
        return torch.get_num_threads()

    assert list(side_by_side(count, [0], 2)) == [threads]
    assert list(side_by_side(count, [0, 0], 2)) == [1, 1]
    assert list(side_by_side(count, [0, 0], 1)) == [threads] * 2
    assert torch.get_num_threads() == threads


def test_a_part_that_fails_is_told_and_the_rest_is_waited_for(threads):
    running = threading.Semaphore(0)

    def work(part: int) -> int:
        if part == 1:
            raise ValueError("part 1")
        running.release()
        return part

    with pytest.raises(ValueError, match="part 1"):
        list(side_by_side(work, range(6), 2))
    assert torch.get_num_threads() == threads


def test_a_caller_that_stops_early_leaves_the_rest_undone(threads):
    done: list[int] = []

    def work(part: int) -> int:
        time.sleep(0.01)
        done.append(part)
        return part

    for result in side_by_side(work, range(50), 2):
        if result == 1:
            break
    finished = len(done)
    time.sleep(0.05)
    assert len(done) == finished < 50


def test_gradients_are_those_of_one_part_after_the_other(threads):
    generator = torch.Generator().manual_seed(0)
    weight, unused = (torch.nn.Parameter(torch.randn(6, 6, generator=generator)) for _ in range(2))
    inputs = [torch.randn(5, 6, generator=generator) for _ in range(7)]

    def loss_of(x):
        loss = (x @ weight).tanh().square().sum()
        return loss, loss.item()

    found = []
    for workers in (1, 2, 2):
        weight.grad = None
        values = add_gradients(loss_of, inputs, [weight, unused], workers)
        assert weight.grad is not None and unused.grad is None
        found.append((values, weight.grad.clone()))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1])
    assert torch.equal(found[1][1], found[2][1])  # byte for byte, whichever thread was first


def test_only_small_models_are_worked_on_side_by_side(threads):
    cpu = torch.device("cpu")
    assert workers_for(torch.nn.Linear(10, 10), cpu) == 2
    assert workers_for(torch.nn.Linear(10, 10), torch.device("meta")) == 1
    with torch.device("meta"):
        assert workers_for(torch.nn.Linear(5000, 5000), cpu) == 1


@pytest.mark.parametrize("shortest", [2, 1], ids=["packed", "through a cache"])
@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_scores_of_a_group_are_those_of_whole_sequences_gradients_too(kind, shortest, tiny_model):
    """The prompt is passed once for all its responses; groups of several lengths of prompt in one batch."""
    roles = backbone(kind, tiny_model, ("reward", "reference"), ("reward",))
    groups = [list(group.sequences) for group in comparisons(4)]
    groups[1] = groups[1][:1]
    groups[2] = [TokenSequence(groups[2][0].prompt_ids[:shortest], s.response_ids) for s in groups[2]]
    flat = [s for group in groups for s in group]
    ids, _, lengths = pad_sequences(flat, 0)
    found = []
    for scores_of in (lambda: micro_scores(roles, ids, lengths), lambda: micro_group_scores(roles, groups, 0)):
        for parameter in roles.parameters("reward").values():
            parameter.grad = None
        scores = scores_of()
        (scores * torch.arange(1.0, len(flat) + 1)).sum().backward()
        grads = {n: p.grad.clone() for n, p in roles.parameters("reward").items() if p.grad is not None}
        found.append((scores.detach(), grads))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-5, rtol=1e-5)
    assert found[0][1].keys() == found[1][1].keys() and len(found[0][1]) > 10
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, atol=1e-4, rtol=1e-4, msg=name)
