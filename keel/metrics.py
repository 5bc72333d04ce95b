"""The registry of metrics: name, unit, how values of one step are reduced, healthy range, and what it means.

Every number that a stage writes to metrics.jsonl stands here; the log refuses others. No torch: readers of run folders
import this.
"""

from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "max", "last"]


@dataclass(frozen=True)
class Metric:
    """One metric.

    unit: what 1.0 means. reduction: how parts of one step become its value. healthy: the range of a run that goes well,
    null where there is none. meaning: one line for a person. timed: differs between two runs of the same seed.
    """

    name: str
    unit: str
    reduction: Reduction
    meaning: str
    healthy: tuple[float, float] | None = None
    timed: bool = False


PROFILED = {
    "generate": "sampling",
    "score": "scoring",
    "policy": "the policy's log-probabilities before the update",
    "reference": "the reference's log-probabilities, and the exact KL where it is used",
    "values": "the critic's values before the update",
    "update": "gradient steps",
}
"""The parts of a step of online training whose speed is measured."""


def _profile() -> list[Metric]:
    found = [
        Metric("seconds", "s", "sum", "wall time of the step, without its checkpoint", timed=True),
        Metric("seconds_experience", "s", "sum", "wall time of rewards per token, returns, advantages", timed=True),
        Metric(
            "seconds_save",
            "s",
            "last",
            "wall time that the checkpoint of the step before held up training",
            timed=True,
        ),
        Metric("product_rate", "FLOP/s", "last", "of a plain matrix product here, as a pass makes it", timed=True),
        Metric("utilisation", "share", "last", "model FLOP/s of the step by product_rate", timed=True),
    ]
    for name, what in PROFILED.items():
        tokens = "response tokens" if name == "generate" else "tokens of prompts and responses"
        found += [
            Metric(f"seconds_{name}", "s", "sum", f"wall time of {what}", timed=True),
            Metric(f"tokens_per_second_{name}", "tokens/s", "last", f"{tokens} by the time of {what}", timed=True),
            Metric(f"utilisation_{name}", "share", "last", f"model FLOP/s of {what} by product_rate", timed=True),
        ]
    return found


_ALL = [
    Metric("loss", "nats", "mean", "loss per supervised token (sft), pair (reward, preference) or thumb (kto)"),
    Metric("heldout_loss", "nats", "last", "the same on rows kept back"),
    Metric("accuracy", "share", "mean", "pairs in which the preferred response scores higher", (0.5, 1.0)),
    Metric("heldout_accuracy", "share", "last", "the same on pairs kept back", (0.5, 1.0)),
    Metric("margin", "score", "mean", "score of the preferred response minus the other's"),
    Metric("reward_chosen", "reward", "mean", "reward that a preference loss implies, of preferred responses"),
    Metric("reward_rejected", "reward", "mean", "the same of the others; a loss of differences may let both fall"),
    Metric("heldout_reward_chosen", "reward", "last", "reward_chosen on rows kept back"),
    Metric("kto_baseline", "nats", "last", "KTO's estimate of the KL to the reference, at least 0"),
    Metric("grad_norm", "1", "mean", "norm of the gradient before it is clipped"),
    Metric("learning_rate", "1", "last", "learning rate of the step"),
    Metric("tokens", "tokens", "sum", "tokens that carried loss"),
    Metric("score", "reward", "mean", "reward per response before the KL penalty"),
    Metric("score_sd", "reward", "last", "its standard deviation over the batch"),
    Metric("gold", "gold", "mean", "the sandbox's exact reward of the rollouts; training never sees it"),
    Metric("kl_per_response", "nats", "mean", "log-ratio to the reference summed over a response", (0.0, 20.0)),
    Metric("kl_per_token", "nats", "mean", "log-ratio to the reference per response token"),
    Metric("kl_coefficient", "reward/nat", "last", "weight of the KL penalty in this step's rewards"),
    Metric("entropy", "nats", "mean", "entropy of the policy per response token"),
    Metric("length", "tokens", "mean", "tokens per response, end token included"),
    Metric("eos_rate", "share", "mean", "responses that ended by themselves", (0.9, 1.0)),
    Metric("dropped", "responses", "sum", "truncated responses left out of the update"),
    Metric("unscored", "responses", "sum", "responses whose reward failed, left out of the update", (0.0, 0.0)),
    Metric(
        "explained_variance", "share", "last", "share of the variance of returns that the critic foresaw", (0.0, 1.0)
    ),
    Metric("policy_loss", "1", "mean", "loss of the policy, all its terms"),
    Metric("value_loss", "reward^2", "mean", "half squared error of the value per token"),
    Metric("clip_fraction", "share", "mean", "tokens whose ratio was clipped", (0.0, 0.3)),
    Metric("dual_clip_fraction", "share", "mean", "tokens that met the dual clip's bound"),
    Metric("steps_taken", "share", "last", "optimizer steps of the update before target_kl ended it", (0.25, 1.0)),
    Metric("padding_experience", "share", "last", "padding in the micro-batches that scored the rollouts", (0.0, 0.05)),
    Metric("padding_update", "share", "mean", "padding in the micro-batches of the update", (0.0, 0.05)),
    Metric("ptx_loss", "nats", "mean", "language-modelling loss that is mixed in, per token"),
    Metric(
        "equal_groups", "share", "mean", "prompts whose responses all scored the same, which teach nothing", (0.0, 0.5)
    ),
    Metric("approx_kl", "nats", "mean", "k3 estimate of the KL from the rollout policy, per token", (0.0, 0.1)),
    Metric(
        "first_log_ratio", "nats", "max", "largest |log ratio| in the first minibatch; 0 but for rounding", (0.0, 1e-4)
    ),
    Metric("sampler_mismatch", "nats", "max", "largest |trainer - sampler| log-probability of a sampled token"),
    Metric("policy_grad_norm", "1", "mean", "norm of the policy's gradient before it is clipped"),
    Metric("critic_grad_norm", "1", "mean", "norm of the critic's gradient before it is clipped"),
    Metric("return_mean", "reward", "mean", "mean return per token"),
    Metric("warming", "0/1", "last", "1 while only the critic learns"),
    Metric("distinct", "share", "last", "distinct responses among those of the step"),
    Metric("skipped_steps", "steps", "sum", "steps left out because a number was not finite; absent where none was"),
    *_profile(),
    # classic tasks
    Metric("environment_steps", "steps", "last", "steps of all environments since the start"),
    Metric("episodes", "episodes", "last", "episodes that have ended since the start"),
    Metric("episode_return", "reward", "last", "mean return of the last 100 episodes, as the task gives it"),
    Metric("episode_length", "steps", "last", "mean length of the last 100 episodes"),
    Metric(
        "update_kl", "nats", "last", "exact KL(before || after) of the policy over the rollout's states", (0.0, 0.1)
    ),
    Metric("step_fraction", "share", "last", "part of trpo's full step that the line search took, 0 for none"),
    Metric("line_search_tries", "steps", "last", "steps that trpo's line search tried"),
]

REGISTRY: dict[str, Metric] = {metric.name: metric for metric in _ALL}
TIMED = frozenset(name for name, metric in REGISTRY.items() if metric.timed)
"""Names of those that differ between two runs of the same seed."""


def check(names: set[str]) -> None:
    """Asserts that every name is registered; an unregistered one is our own fault, not the user's."""
    unknown = names - REGISTRY.keys() - {"step"}
    assert not unknown, f"metrics without an entry in the registry: {sorted(unknown)}"
