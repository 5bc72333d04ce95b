"""One update of each algorithm, from the same experience: PPO's many small steps, TRPO's one bounded step, REINFORCE's
one plain step."""

from collections import Counter

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from keel.algo.trust_region import conjugate_gradient, fisher_product, line_search, step_length
from keel.classic.config import ClassicConfig
from keel.classic.experience import Experience, shuffled
from keel.classic.losses import critic_loss, mean, policy_loss, whitened
from keel.classic.networks import ActorCritic
from keel.train.optim import guarded_step


def ppo(
    network: ActorCritic,
    optimizer: Optimizer,
    experience: Experience,
    config: ClassicConfig,
    generator: torch.Generator,
    where: str,
) -> dict[str, float]:
    """Epochs of minibatches, one step of Adam for policy and critic together in each.

        loss = policy + value_coefficient * value - entropy * H(pi)

    Schulman et al. 2017 (arXiv 1707.06347), equation 9, with the minibatch scheme of Huang et al. 2022. Returns means
    over the minibatches; `first_log_ratio` is the largest |log ratio| of the first one, 0 but for rounding.
    """
    assert config.epochs and config.minibatches and config.clip and config.value_coefficient
    value_clip = config.clip if config.value_clip else None
    totals: Counter[str] = Counter()
    first = 0.0
    for epoch in range(config.epochs):
        for number, n in enumerate(shuffled(len(experience), config.minibatches, generator)):
            policy, values_N = network.both(experience.observations_NO[n])
            logprobs_N = policy.logprobs(experience.actions_N[n])
            advantages_N = whitened(experience.advantages_N[n], config.whiten)
            surrogate, metrics = policy_loss(logprobs_N, experience.logprobs_N[n], advantages_N, config.clip)
            value = critic_loss(values_N, experience.values_N[n], experience.returns_N[n], value_clip)
            entropy = mean(policy.entropy())
            (surrogate + config.value_coefficient * value - (config.entropy or 0.0) * entropy).backward()
            norm = _step(optimizer, config, f"{where}, epoch {epoch + 1}, minibatch {number + 1}")
            if epoch == number == 0:
                first = metrics["log_ratio_abs_max"].item()
            totals.update({"policy_loss": surrogate.item(), "value_loss": value.item(), "entropy": entropy.item()})
            totals.update({name: metrics[name].item() for name in ("clip_fraction", "approx_kl")})
            totals.update({"grad_norm": norm})
    steps = config.epochs * config.minibatches
    return {name: total / steps for name, total in totals.items()} | {"first_log_ratio": first}


def reinforce(
    network: ActorCritic, optimizer: Optimizer, experience: Experience, config: ClassicConfig, where: str
) -> dict[str, float]:
    """One step of Adam along mean(A * grad log pi): Williams 1992, with the mean over steps and an entropy bonus."""
    policy = network.policy(experience.observations_NO)
    logprobs_N = policy.logprobs(experience.actions_N)
    advantages_N = whitened(experience.advantages_N, config.whiten)
    loss, _ = policy_loss(logprobs_N, experience.logprobs_N, advantages_N)
    entropy = mean(policy.entropy())
    (loss - (config.entropy or 0.0) * entropy).backward()
    norm = _step(optimizer, config, where)
    return {"policy_loss": loss.item(), "entropy": entropy.item(), "grad_norm": norm}


def trpo(network: ActorCritic, experience: Experience, config: ClassicConfig) -> dict[str, float]:
    """One natural-gradient step, as long as the KL bound and the line search allow; else the policy stays.

    Schulman et al. 2015 (arXiv 1502.05477), equation 14 and appendix C: direction x = H^-1 g by conjugate gradients,
    length sqrt(2 delta / x^T H x), backtracking on surrogate and KL.
    """
    assert config.max_kl and config.cg_iterations and config.cg_damping is not None
    assert config.line_search_shrink and config.line_search_attempts
    parameters = network.policy_parameters()
    advantages_N = whitened(experience.advantages_N, config.whiten)

    def surrogate() -> Tensor:
        logprobs_N = network.policy(experience.observations_NO).logprobs(experience.actions_N)
        return -policy_loss(logprobs_N, experience.logprobs_N, advantages_N)[0]

    def kl() -> Tensor:
        return mean(experience.policy.kl(network.policy(experience.observations_NO)))

    before = surrogate()
    slope_D = parameters_to_vector(torch.autograd.grad(before, parameters))
    product = fisher_product(kl(), parameters, config.cg_damping)
    direction_D = conjugate_gradient(product, slope_D, config.cg_iterations)
    step_D = step_length(direction_D, product(direction_D), config.max_kl) * direction_D

    with torch.no_grad():
        start_D = parameters_to_vector(parameters).clone()

        def measure(fraction: float) -> tuple[float, float]:
            vector_to_parameters(start_D + fraction * step_D, parameters)
            return (surrogate() - before).item(), kl().item()

        accepted, tries = line_search(measure, config.max_kl, config.line_search_shrink, config.line_search_attempts)
        if accepted is None:
            vector_to_parameters(start_D, parameters)
        entropy = mean(experience.policy.entropy()).item()
    return {
        "policy_loss": -before.item(),
        "entropy": entropy,
        "grad_norm": slope_D.norm().item(),
        "step_fraction": accepted.fraction if accepted else 0.0,
        "line_search_tries": tries,
    }


def fit_critic(
    network: ActorCritic,
    optimizer: Optimizer,
    experience: Experience,
    config: ClassicConfig,
    generator: torch.Generator,
    where: str,
) -> dict[str, float]:
    """Epochs of minibatches on the squared error alone, for algorithms whose policy takes a step of its own."""
    assert config.critic_epochs and config.critic_batch
    parts = max(1, len(experience) // config.critic_batch)
    total = 0.0
    for _ in range(config.critic_epochs):
        for n in shuffled(len(experience), parts, generator):
            values_N = network.values(experience.observations_NO[n])
            loss = critic_loss(values_N, experience.values_N[n], experience.returns_N[n])
            loss.backward()
            _step(optimizer, config, f"{where}, critic")
            total += loss.item()
    return {"value_loss": total / (config.critic_epochs * parts)}


def _step(optimizer: Optimizer, config: ClassicConfig, where: str) -> float:
    return guarded_step({"network": optimizer}, {"network": config.max_grad_norm}, where)["network"]
