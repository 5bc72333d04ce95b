"""Every literal of `advantage`, `policy.loss` and `kl`: it runs, learns, and resumes; and what each must not do."""

import math
from typing import get_args

import pytest
import torch

from keel.algo.moments import Moments
from keel.config import PpoConfig
from keel.errors import Interrupted
from keel.models.roles import exact_kl_BT, logprobs_BT, values_BT
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.log import read_lines
from keel.train.choices import Before, Now, advantages, policy_objective
from keel.train.experience import kept_rows, make_experience
from keel.train.learner import first_state
from keel.train.optim import make_optimizer
from keel.train.sft import token_loss
from keel.train.update import accumulate, update
from tests.tiny import backbone, encoder_of, prompts
from tests.train.test_online import BACKBONES, experience_of, learner_of, recipe_of, rolled_out, run_ppo

CRITIC_FREE = [name for name in get_args(PpoConfig.model_fields["advantage"].annotation) if name != "gae"]


def free(advantage: str, **ppo):
    """A recipe without a critic; four responses to a prompt."""
    recipe = recipe_of(**{"advantage": advantage, "responses_per_prompt": 4, "critic": {}, **ppo})
    assert recipe.ppo and not recipe.ppo.has_critic
    return recipe


GROUPED_BY_TWO = {
    "reinforce": [1, 2, 3, 6],
    "reinforce_baseline": [-2, -1, 0, 3],
    "reinforce_plus_plus": [-0.92582, -0.46291, 0, 1.38873],  # by the sd of all, sqrt(14 / 3)
    "reinforce_plus_plus_baseline": [-0.38730, 0.38730, -1.16190, 1.16190],  # less the group's mean, by sqrt(5 / 3)
    "rloo": [-1, 1, -3, 3],
    "remax": [0, 1, 1, 4],
    "grpo": [-0.70711, 0.70711, -0.70711, 0.70711],
    "dr_grpo": [-0.5, 0.5, -1.5, 1.5],
}
"""Four responses of one token that scored 1, 2, 3 and 6, two to each prompt, whose likeliest ones scored 1 and 2."""


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_each_advantage_is_its_own_by_hand(name):
    ppo = free(name).ppo
    assert ppo
    scores, groups, greedy = torch.tensor([[1.0], [2], [3], [6]]), torch.tensor([0, 0, 1, 1]), [1.0, 1, 2, 2]
    mask = torch.ones(4, 1, dtype=torch.bool)
    found, returns = advantages(ppo, scores, mask, None, None, groups, torch.tensor(greedy))
    assert returns is None
    torch.testing.assert_close(found[:, 0], torch.tensor(GROUPED_BY_TWO[name]).float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "loss"),
    [
        ({"clip": 0.2}, -(2.4 - 0.8) / 2),
        ({"clip": 0.2, "clip_high": 0.28}, -(2.56 - 0.8) / 2),
        ({"clip": 0.2, "entropy_bonus": 0.1}, -(2.4 - 0.8) / 2 - 0.1 * 2),
        ({"clip": 0.2, "importance_cap": 2.0}, -(2 * 2.4 - 0.8) / 2),  # the first token's weight is 4, cut to 2
        ({"loss": "gspo", "clip": 0.2}, -(2 - 1) / 2),  # the sequence's ratio is the geometric mean, 1
        ({"loss": "cispo", "clip": 0.2, "clip_high": 0.2}, -(1.2 * 2 * -1 + 0.8 * -1 * -4) / 2),
        ({"loss": "kl_penalty"}, -(4 - 0.5) / 2 + 3 * 0.5 / 2),  # k3: 2 - 1 - ln 2 and 1/2 - 1 + ln 2
        ({"loss": "policy_gradient"}, -(2 * -1 + -1 * -4) / 2),
    ],
    ids=str,
)
def test_each_policy_loss_is_its_own_by_hand(policy, loss):
    """Two tokens with ratios 2 and 1/2, advantages 2 and -1, log-probabilities -1 and -4, entropies 1 and 3."""
    ppo = recipe_of(policy={"learning_rate": 1e-3, **policy}, minibatches=1).ppo
    assert ppo
    now, step = torch.tensor([[-1.0, -4.0]]), math.log(2)
    before = now - torch.tensor([[step, -step]])
    old = Before(
        torch.ones(1, 2, dtype=torch.bool),
        before,
        before - torch.tensor([[2 * step, 0.0]]),
        before,
        torch.tensor([[2.0, -1.0]]),
        None,
        None,
    )
    state = {"old_kl_penalty": 3.0, "kl_coefficient": 0.0}
    found, _ = policy_objective(ppo, Now(now, torch.tensor([[1.0, 3.0]]), None), old, torch.tensor([[2.0]]), state)
    assert found.item() == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("advantage", CRITIC_FREE)
def test_the_reward_rises_without_a_critic(advantage, tiny_model, tmp_path):
    recipe = free(
        advantage,
        updates=14,
        rollouts=48,
        minibatches=2,
        kl={"coefficient": 0.0},
        checkpoint_every=100,
        policy={"learning_rate": 1e-2},
    )
    roles, stage = run_ppo(tmp_path, "separate", tiny_model, recipe, many_a)
    assert not roles.has("critic")
    lines = list(read_lines(stage.metrics))
    scores = [line["score"] for line in lines]
    assert sum(scores[-3:]) / 3 > 2 * sum(scores[:2]) / 2
    assert all(line["first_log_ratio"] <= 1e-4 and line["warming"] == 0 for line in lines)
    assert not {"explained_variance", "value_loss"} & lines[0].keys()


def many_a(response: str) -> float:
    """Ten times the share of one letter: every response has its own score, unlike with how soon it ends."""
    return 10 * response.count("a") / max(1, len(response))


LOSSES = {
    "clip-higher, dual clip": {"clip": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "cispo": {"loss": "cispo"},
    "gspo": {"loss": "gspo", "clip": 0.2},
    "kl_penalty": {"loss": "kl_penalty"},
    "importance weights, entropy bonus": {"importance_cap": 2.0, "entropy_bonus": 1e-3},
    "constant": {"aggregation": "constant"},
}


@pytest.mark.parametrize("policy", LOSSES.values(), ids=LOSSES)
def test_the_reward_rises_with_every_policy_loss(policy, tiny_model, tmp_path):
    recipe = recipe_of(
        updates=16,
        rollouts=48,
        minibatches=2,
        kl={"coefficient": 0.0},
        checkpoint_every=100,
        policy={"learning_rate": 1e-2, **policy},
        critic={"warmup_cap": 1, "learning_rate": 1e-2},
    )
    _, stage = run_ppo(tmp_path, "separate", tiny_model, recipe, many_a)
    scores = [line["score"] for line in read_lines(stage.metrics)]
    assert sum(scores[-3:]) / 3 > 2 * sum(scores[:2]) / 2


def test_the_plain_policy_gradient_learns_in_one_step_an_update(tiny_model, tmp_path):
    recipe = free(
        "reinforce_baseline",
        updates=30,
        rollouts=48,
        minibatches=1,
        kl={"coefficient": 0.0},
        checkpoint_every=100,
        policy={"learning_rate": 1e-2, "loss": "policy_gradient"},
    )
    _, stage = run_ppo(tmp_path, "separate", tiny_model, recipe, many_a)
    scores = [line["score"] for line in read_lines(stage.metrics)]
    assert sum(scores[-3:]) / 3 > 2 * sum(scores[:2]) / 2


@pytest.mark.parametrize("kind", BACKBONES)
def test_exact_kl_is_the_sum_over_the_vocabulary(kind, tiny_model):
    roles, rollouts = rolled_out(kind, tiny_model, recipe_of())
    with torch.no_grad():
        for parameter in roles.parameters("policy").values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    out = exact_kl_BT(roles, rollouts.sequences(), 0.7, 0, 200)
    for b, sequence in enumerate(rollouts.sequences()):
        ids = torch.tensor([sequence.prompt_ids + sequence.response_ids])
        start, n = len(sequence.prompt_ids) - 1, len(sequence.response_ids)
        p, q = (
            (roles.model(role)(input_ids=ids).logits[0, start : start + n] / 0.7).log_softmax(-1)
            for role in ("policy", "reference")
        )
        torch.testing.assert_close(out[b, :n], (p.exp() * (p - q)).sum(-1), atol=1e-5, rtol=1e-4)
        assert not out[b, n:].any()
    assert out.max() > 1e-3


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_kl_in_the_loss_pulls_the_policy_back(kind, estimator, tiny_model):
    """With advantages of 0 only the KL has a gradient: a step along it shrinks the exact KL."""
    recipe = recipe_of(kl={"place": "loss", "estimator": estimator, "coefficient": 1.0}, minibatches=1, rollouts=64)
    assert recipe.ppo
    state = first_state(recipe.ppo)
    roles = backbone(kind, tiny_model, ("policy", "reference", "critic"))

    def gradient() -> tuple[float, list[torch.Tensor]]:
        rollouts = LocalEngine(roles, encoder_of(tiny_model, 16)).generate(
            prompts(60), Sampling(1.0, 16), seed=0, step=0
        )
        experience, _ = experience_of(roles, recipe, rollouts, torch.zeros(60), 1.0)
        assert not experience.rewards_BT.any()  # the KL is not in the reward too
        experience.advantages_BT.zero_()
        for parameter in roles.parameters("policy").values():
            parameter.grad = None
        accumulate(learner_of(roles, recipe), experience, list(range(60)), state, ["policy"], "here")
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in roles.parameters("policy").values()]
        return exact_kl_BT(roles, rollouts.sequences(), 1.0, 0, 4000).sum().item() / 60, [g.clone() for g in grads]

    before, grads = gradient()
    norm = math.sqrt(sum(g.square().sum().item() for g in grads))
    with torch.no_grad():
        for parameter, g in zip(roles.parameters("policy").values(), grads, strict=True):
            parameter.sub_(0.05 * g / norm)
    after, _ = gradient()
    assert after < before


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [
        ("token_mean", lambda lengths: 1 / lengths.sum()),
        ("sequence_mean_token_mean", lambda lengths: 1 / (len(lengths) * lengths)),
        ("sequence_mean_token_sum", lambda lengths: 1 / len(lengths)),
        ("constant", lambda lengths: 1 / (len(lengths) * 16)),
    ],
    ids=["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"],
)
def test_the_denominator_is_of_the_minibatch_neither_of_a_part_nor_of_the_batch(aggregation, weight, tiny_model):
    """At ratio 1 the loss is minus the advantages, each weighted as the aggregation says; 16 tokens is the limit."""
    recipe = recipe_of(policy={"aggregation": aggregation}, micro_tokens=60)
    assert recipe.ppo
    roles, rollouts = rolled_out("separate", tiny_model, recipe)
    rollouts.response_mask_BT &= torch.arange(16) < torch.arange(3, 15)[:, None]
    rollouts = rollouts.select(range(12))  # rows of unlike lengths, cut to the longest
    experience, _ = experience_of(roles, recipe, rollouts, torch.randn(12))
    rows = [7, 2, 9, 4, 0]
    state = first_state(recipe.ppo)
    got = accumulate(learner_of(roles, recipe), experience, rows, state, ["policy"], "here")["policy_loss"]
    lengths = rollouts.lengths_B[rows].double()
    want = -(experience.advantages_BT[rows].double().sum(1) * weight(lengths)).sum()
    assert got == pytest.approx(want.item(), abs=1e-5) and abs(got) > 1e-3


def test_target_kl_ends_an_update_before_the_step_that_passes_it(tiny_model, tmp_path):
    recipe = recipe_of(epochs=3, policy={"learning_rate": 1e-2, "target_kl": 0.005}, critic={"warmup_cap": 0})
    _, stage = run_ppo(tmp_path, "separate", tiny_model, recipe)
    lines = list(read_lines(stage.metrics))
    assert any(line["steps_taken"] < 1 for line in lines)
    assert all(line["steps_taken"] >= 1 / 9 and line["approx_kl"] <= 0.005 for line in lines)


def test_target_kl_never_ends_an_update_before_its_first_step(tiny_model):
    """Rounding, which a bfloat16 base has much of, is no KL from the old policy."""
    recipe = recipe_of(policy={"target_kl": 1e-6})
    assert recipe.ppo
    roles, rollouts = rolled_out("separate", tiny_model, recipe)
    experience, _ = experience_of(roles, recipe, rollouts, torch.randn(12))
    experience.policy_logprobs_BT += 0.05 * torch.randn_like(experience.policy_logprobs_BT)
    optimizers = {"policy": make_optimizer(roles.parameters("policy").values())}
    out = update(learner_of(roles, recipe), experience, 0, first_state(recipe.ppo), optimizers)
    assert out["steps_taken"] == pytest.approx(1 / 3) and out["approx_kl"] > 1e-6


def test_popart_moves_the_statistics_and_not_the_values(tiny_model):
    recipe = recipe_of(critic={"popart": True})
    assert recipe.ppo
    roles, rollouts = rolled_out("separate", tiny_model, recipe)
    state = first_state(recipe.ppo)
    before, _ = values_BT(roles, rollouts.sequences(), 0, 4000)
    experience, _ = make_experience(learner_of(roles, recipe), rollouts, 100 + torch.randn(12), torch.arange(12), state)
    known = Moments(*state["return_moments"])
    assert known.count == rollouts.response_mask_BT.sum() and known.mean > 50
    after, _ = values_BT(roles, rollouts.sequences(), 0, 4000)
    inside = rollouts.response_mask_BT
    torch.testing.assert_close((after * known.scale + known.mean)[inside], before[inside], atol=2e-4, rtol=1e-5)
    assert experience.returns_BT is not None
    metrics = accumulate(learner_of(roles, recipe), experience, list(range(12)), state, ["critic"], "here")
    # In units of sd: half the mean of squares of what the values miss, however large the rewards are.
    assert metrics["value_loss"] < 0.5 * (known.mean / known.scale + 3) ** 2


def test_scores_are_normalised_over_all_batches_so_far(tiny_model, tmp_path):
    recipe = recipe_of(normalise_scores=True, updates=3)
    scores: list[float] = []

    def reward(response: str) -> float:
        scores.append(1000.0 + len(response))
        return scores[-1]

    _, stage = run_ppo(tmp_path, "separate", tiny_model, recipe, reward)
    seen = torch.tensor(scores, dtype=torch.float64)
    first = [line for line in read_lines(stage.samples) if line["step"] == 1]
    for row, line in enumerate(first):
        want = (scores[row] - seen[:12].mean()) / seen[:12].std(correction=0)
        assert line["score"] == pytest.approx(want.item(), abs=1e-3)
    last = [line for line in read_lines(stage.samples) if line["step"] == 3]
    for row, line in enumerate(last):
        want = (scores[24 + row] - seen.mean()) / seen.std(correction=0)
        assert line["score"] == pytest.approx(want.item(), abs=1e-3)


def test_ptx_keeps_what_sft_taught(tiny_model, tmp_path):
    """The same run with language modelling mixed in ends with a lower loss on the demonstrations."""
    encoder = encoder_of(tiny_model, 16)
    rows = [encoder.sequence(prompt, "the shop is open") for prompt in prompts(12)]
    losses = {}
    for weight in (0.0, 1.0):

        def ptx(roles, weight=weight):
            step = token_loss(roles, "policy", rows, 0, 4000, weight)
            return lambda n: step([(4 * n + i) % 12 for i in range(4)])["loss"]

        roles, stage = run_ppo(
            tmp_path / str(weight), "separate", tiny_model, recipe_of(updates=6), ptx=ptx if weight else None
        )
        logprobs, _ = logprobs_BT(roles, "policy", rows, 1.0, 0, 4000)
        losses[weight] = -logprobs.sum().item()
        assert ("ptx_loss" in list(read_lines(stage.metrics))[-1]) == bool(weight)
    assert losses[1.0] < 0.9 * losses[0.0]


def test_a_response_left_alone_in_its_group_is_dropped_too(tiny_model):
    recipe, other = free("rloo", truncated="drop"), recipe_of(truncated="drop")
    assert recipe.ppo and other.ppo
    _, rollouts = rolled_out("separate", tiny_model, recipe)
    stopped = (0, 4, 5, 6)
    rollouts.finish = ["stop" if b in stopped else "length" for b in range(12)]
    assert kept_rows(rollouts, recipe.ppo, range(len(rollouts))) == [4, 5, 6]
    assert kept_rows(rollouts, other.ppo, range(len(rollouts))) == [0, 4, 5, 6]


@pytest.mark.parametrize(
    "ppo",
    [
        {"critic": {"popart": True, "warmup_cap": 1}, "normalise_scores": True, "policy": {"loss": "kl_penalty"}},
        {"advantage": "remax", "critic": {}, "policy": {"target_kl": 0.01}},
        {"advantage": "grpo", "critic": {}, "responses_per_prompt": 4, "kl": {"place": "loss", "estimator": "k3"}},
    ],
    ids=["popart and kl_penalty", "remax", "grpo"],
)
def test_stopped_and_resumed_is_byte_for_byte_the_unbroken_run(ppo, tiny_model, tmp_path):
    recipe = recipe_of(**ppo)
    whole, _ = run_ppo(tmp_path / "whole", "separate", tiny_model, recipe)
    with pytest.raises(Interrupted):
        run_ppo(tmp_path / "broken", "separate", tiny_model, recipe, stop_at=3)
    resumed, _ = run_ppo(tmp_path / "broken", "separate", tiny_model, recipe)
    assert resumed.fingerprint("policy") == whole.fingerprint("policy")
