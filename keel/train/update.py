"""The update of an online step: epochs of minibatches of micro-batches over its experience."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from keel.algo import moments
from keel.algo.masking import loss_denominators
from keel.algo.value_loss import value_loss
from keel.data.encode import micro_batches, pad_sequences, padding_share
from keel.errors import NumberError, StepError
from keel.models import spare
from keel.models.roles import Role, lengths_with_kin, micro_policy, micro_values, unpacked
from keel.models.side_by_side import add_gradients
from keel.runs.files import not_finite
from keel.train.choices import Before, Now, policy_objective
from keel.train.learner import Learner, moments_of
from keel.train.numbers import rows_at_fault, told_rollouts
from keel.train.optim import guarded_step
from keel.types import Experience

ROLES_TRAINED: tuple[Role, ...] = ("policy", "critic")


def _reraise(error: StepError, batch: Sequence[Mapping[str, Any]]) -> None:
    raise error


@spare.kept()
def update(
    learner: Learner,
    experience: Experience,
    step: int,
    state: Mapping[str, Any],
    optimizers: Mapping[str, Optimizer],
    bad_step: Callable[[StepError, Sequence[Mapping[str, Any]]], None] = _reraise,
) -> dict[str, float]:
    """Epochs of minibatches of micro-batches; each minibatch is one step of each optimizer that is given.

    The order of rows is drawn from (seed, step). Without the policy's optimizer only the critic learns. Ends early at a
    minibatch whose approximate KL passes `policy.target_kl`, without that step. Returns means over the minibatches that
    were stepped; `first_log_ratio` is the largest |log ratio| of the very first one.

    bad_step: told of a minibatch with a number that is not finite, with its rows; where it returns, that minibatch is
    left out.
    """
    ppo, rows_in_all = learner.ppo, len(experience.rollouts)
    minibatches = min(ppo.minibatches, rows_in_all)
    planned = ppo.epochs * minibatches
    bounds = {"policy": ppo.policy.max_grad_norm, "critic": ppo.critic.max_grad_norm}
    totals: Counter[str] = Counter()
    first: dict[str, float] = {}
    done = 0
    for epoch in range(ppo.epochs):
        # PCG64 by name: default_rng may change its bit generator between numpy versions.
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([learner.seed, step, epoch]))).permutation(
            rows_in_all
        )
        for number, rows in enumerate(part.tolist() for part in np.array_split(order, minibatches)):
            where = f"ppo, update {step + 1}, epoch {epoch + 1}, minibatch {number + 1}"
            try:
                metrics = accumulate(learner, experience, rows, state, optimizers.keys(), where)
                if bad := not_finite(metrics):
                    raise NumberError(f"{bad} is not finite; no weight was changed", where=where)
                largest = metrics.pop("log_ratio_abs_max", None)
                # Not before the first step: there the policy is the old one, and all that is measured is rounding.
                if done and ppo.policy.target_kl and metrics.get("approx_kl", 0.0) > ppo.policy.target_kl:
                    for optimizer in optimizers.values():
                        optimizer.zero_grad(set_to_none=True)
                    return _means(totals, done, planned) | first
                if learner.ptx and "policy" in optimizers:
                    metrics["ptx_loss"] = learner.ptx(step * planned + done)
                for role, norm in guarded_step(optimizers, bounds, where).items():
                    metrics[f"{role}_grad_norm"] = norm
            except NumberError as error:
                if not error.final:
                    error.rows = _rows_at_fault(learner, experience, rows, state, optimizers.keys())
                bad_step(error, told_rollouts(experience.rollouts, rows, experience.scores_B))
                continue
            if largest is not None and not done:
                first["first_log_ratio"] = largest
            totals.update(metrics)
            done += 1
    return _means(totals, done, planned) | first


def _rows_at_fault(
    learner: Learner, experience: Experience, rows: list[int], state: Mapping[str, Any], learners: Collection[str]
) -> list[int]:
    parameters = [p for role in ROLES_TRAINED if role in learners for p in learner.roles.parameters(role).values()]
    return rows_at_fault(rows, lambda some: accumulate(learner, experience, some, state, learners, "alone"), parameters)


def accumulate(
    learner: Learner,
    experience: Experience,
    rows: Sequence[int],
    state: Mapping[str, Any],
    learners: Collection[str],
    where: str,
) -> dict[str, float]:
    """Adds the gradients of one minibatch, micro-batch by micro-batch; denominators are counted over all of it before.

    where: the minibatch, for errors. Raises NumberError where a loss is not finite, before any optimizer has stepped.
    """
    roles, ppo = learner.roles, learner.ppo
    sequences, lengths_B = experience.rollouts.sequences(), experience.rollouts.lengths_B
    tokens = int(lengths_B[list(rows)].sum())
    assert ppo.policy.aggregation is not None
    denominators_B1 = torch.ones(len(sequences), 1)
    denominators_B1[list(rows)] = loss_denominators(lengths_B[list(rows)], ppo.policy.aggregation, learner.max_tokens)

    def micro(part: list[int]) -> tuple[Tensor, Tensor, Before, list[int]]:
        some = [rows[i] for i in part]
        ids_BS, places_BS, _ = pad_sequences([sequences[i] for i in some], learner.pad_id)
        return ids_BS.to(roles.device), places_BS.to(roles.device), Before.of(experience, some, roles.device), some

    def policy_loss(part: list[int]) -> tuple[Tensor, dict[str, float]]:
        ids_BS, places_BS, old, some = micro(part)
        exact = ppo.kl.place == "loss" and ppo.kl.estimator == "exact"
        logprobs_N, entropy_N, kl_N = micro_policy(roles, ids_BS, places_BS, ppo.temperature, exact)
        now = Now(
            unpacked(logprobs_N, old.mask_BT),
            unpacked(entropy_N, old.mask_BT),
            None if kl_N is None else unpacked(kl_N, old.mask_BT),
        )
        loss, metrics = policy_objective(ppo, now, old, denominators_B1[some].to(roles.device), state)
        return _finite(loss, "policy", where), {
            "policy_loss": loss.item(),
            **{n: total.item() for n, total in metrics.items()},
        }

    known = moments_of(state, "return")  # the critic's outputs are in their units; 0 and 1 without popart

    def critic_loss(part: list[int]) -> tuple[Tensor, float]:
        ids_BS, places_BS, old, _ = micro(part)
        assert old.values_BT is not None and old.returns_BT is not None
        values_BT = unpacked(micro_values(roles, ids_BS, places_BS), old.mask_BT)
        before_BT, returns_BT = (moments.normalised(x_BT, known) for x_BT in (old.values_BT, old.returns_BT))
        loss, _ = value_loss(values_BT, before_BT, returns_BT, old.mask_BT, ppo.critic.clip, tokens)
        return _finite(loss, "critic", where), loss.item()

    losses: dict[str, Callable[[list[int]], tuple[Tensor, Any]]] = {"policy": policy_loss, "critic": critic_loss}
    taught: list[Role] = [role for role in ROLES_TRAINED if role in learners]
    workers = min(roles.workers(role) for role in taught)
    # Where cores work side by side, each takes a role rather than a piece of both: fewer and larger operations.
    lengths = lengths_with_kin([sequences[i] for i in rows])
    parts = micro_batches(lengths, ppo.micro_tokens, max(1, workers // len(taught)))
    jobs = [(role, part) for role in taught for part in parts]
    parameters = [parameter for role in taught for parameter in roles.parameters(role).values()]
    found = add_gradients(lambda job: losses[job[0]](job[1]), jobs, parameters, workers)
    told = {role: [what for (own, _), what in zip(jobs, found, strict=True) if own == role] for role in taught}

    totals = {"padding_update": padding_share([len(sequences[i]) for i in rows], parts)}
    if "policy" in told:
        largest = max(metrics.pop("log_ratio_abs_max") for metrics in told["policy"])
        loss = sum(metrics.pop("policy_loss") for metrics in told["policy"])
        sums = Counter[str]()
        for metrics in told["policy"]:
            sums.update(metrics)
        totals |= {"policy_loss": loss, "log_ratio_abs_max": largest, **{name: n / tokens for name, n in sums.items()}}
    if "critic" in told:
        totals["value_loss"] = sum(told["critic"])
    return totals


def _means(totals: Mapping[str, float], done: int, planned: int) -> dict[str, float]:
    return {name: value / max(done, 1) for name, value in totals.items()} | {"steps_taken": done / planned}


def _finite(loss: Tensor, part: str, where: str) -> Tensor:
    if not torch.isfinite(loss):
        raise NumberError(
            f"the {part}'s loss is {loss.item()}; the optimizer did not step",
            where=where,
            remedy="the same command goes on from the last checkpoint",
        )
    return loss
