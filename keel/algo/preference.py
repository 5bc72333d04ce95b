"""Losses on preferences: scores of a reward model in pairs, a policy's log-probabilities in pairs, and single thumbs.

Log-probabilities here are sums over a response's tokens, the end token included, in nats: [B], one number a response.
h = log pi(chosen) / pi_ref(chosen) - log pi(rejected) / pi_ref(rejected), the log-ratio margin, in nats.

Every loss returns (loss, metrics). Metrics are detached scalars that add over micro-batches of one denominator:
`reward_chosen` and `reward_rejected` (means of the reward that the loss implies, in its own unit), `margin` (their
difference) and `accuracy` (share of pairs whose chosen response has the higher one, ties half).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

SURE = -1e-6
"""The largest mean log-probability of a token that odds are taken of (nats): at 0 they would be infinite."""

Metrics = dict[str, Tensor]


def bradley_terry(
    chosen_B: Tensor,
    rejected_B: Tensor,
    denominator: float | Tensor,
    *,
    margin_B: Tensor | None = None,
    weight_B: Tensor | None = None,
    centring: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the preferences, with margin, weight of the pair and centring of the scores:
    (1 / denominator) * sum_b w[b] * (-log sigmoid(c[b] - r[b] - m[b]) + centring * (c[b] + r[b])^2).

    Bradley and Terry 1952; as a reward model's loss: Ouyang et al. 2022 (arXiv 2203.02155), equation 1, where each pair
    of a prompt has the weight 1 / (K(K-1)/2) and the denominator counts prompts. The margin: Touvron et al. 2023 (Llama
    2, arXiv 2307.09288), equation 2. The centring, as only differences of scores are told apart by the first term:
    Eisenstein et al. 2023 (arXiv 2312.09244).

    Args:
        chosen_B: scores of the preferred responses; a difference of 1 is odds of e.
        rejected_B: scores of the others, same shape.
        denominator: pairs of the whole (global) batch, or the sum of their weights; larger than 0.
        margin_B: by how much the chosen response is to be ahead (score). None: 0.
        weight_B: weight of each pair. None: 1.
        centring: weight of the square (1 / score^2).

    Returns: (loss in nats, metrics), metrics detached scalars that add over micro-batches of one denominator:
    `accuracy` (share of pairs with chosen above rejected; a tie is wrong), `margin` (mean difference of scores).
    """
    assert chosen_B.shape == rejected_B.shape, (chosen_B.shape, rejected_B.shape)
    ahead_B = chosen_B - rejected_B
    loss_B = -logsigmoid(ahead_B if margin_B is None else ahead_B - margin_B)
    if centring:
        loss_B = loss_B + centring * (chosen_B + rejected_B).square()
    weight_B = torch.ones_like(ahead_B) if weight_B is None else weight_B
    with torch.no_grad():
        right_B = (ahead_B > 0).float()
        metrics = {"accuracy": (weight_B * right_B).sum(), "margin": (weight_B * ahead_B).sum()}
    return (weight_B * loss_B).sum() / denominator, {name: value / denominator for name, value in metrics.items()}


def dpo(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    beta: float,
    denominator: float | Tensor,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Direct preference optimisation: (1 / denominator) * sum -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h).

    Rafailov et al. 2023 (arXiv 2305.18290), equation 7, with e = 0. Conservative DPO with e > 0: Mitchell 2023 ("A note
    on DPO with noisy preferences & relationship to IPO"), for labels that are wrong with probability e; its minimum is
    at sigmoid(beta h) = 1 - e, so the margin stays finite.

    Args:
        policy_chosen_B, policy_rejected_B: log pi of both responses.
        reference_chosen_B, reference_rejected_B: log pi_ref of both.
        beta: strength of the pull towards the reference (reward / nat).
        denominator: pairs of the whole (global) batch.
        label_smoothing: e, from 0 to 1/2.

    Returns: (loss in nats, metrics); the implied reward is beta * log(pi / pi_ref).
    """
    chosen_B = beta * (policy_chosen_B - reference_chosen_B)
    rejected_B = beta * (policy_rejected_B - reference_rejected_B)
    margin_B = chosen_B - rejected_B
    loss_B = -(1 - label_smoothing) * logsigmoid(margin_B) - label_smoothing * logsigmoid(-margin_B)
    return loss_B.sum() / denominator, _compare(chosen_B, rejected_B, denominator)


def robust_dpo(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    beta: float,
    denominator: float | Tensor,
    label_smoothing: float,
) -> tuple[Tensor, Metrics]:
    """Provably robust DPO: (1 / denominator) * sum (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2e).

    Chowdhury, Kini, Natarajan 2024 (arXiv 2403.00409), the loss called rDPO: where labels are flipped with probability
    e, its mean over the flips is the DPO loss of the true labels. Unlike conservative DPO it has no minimum: it falls
    without end as h grows, e / (1 - 2e) * beta for each nat.

    Args: as for `dpo`; label_smoothing e is less than 1/2.

    Returns: (loss in nats, may be negative; metrics as for `dpo`).
    """
    chosen_B = beta * (policy_chosen_B - reference_chosen_B)
    rejected_B = beta * (policy_rejected_B - reference_rejected_B)
    margin_B = chosen_B - rejected_B
    loss_B = label_smoothing * logsigmoid(-margin_B) - (1 - label_smoothing) * logsigmoid(margin_B)
    loss = loss_B.sum() / (1 - 2 * label_smoothing) / denominator
    return loss, _compare(chosen_B, rejected_B, denominator)


def ipo(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    beta: float,
    denominator: float | Tensor,
) -> tuple[Tensor, Metrics]:
    """Identity preference optimisation: (1 / denominator) * sum (h - 1 / (2 beta))^2.

    Azar et al. 2023 (arXiv 2310.12036), equation 17, whose tau is beta here. h is the paper's, a sum over tokens, as in
    OpenRLHF; TRL takes means over tokens instead, where the same beta is a much weaker pull.

    Args: as for `dpo`; beta in 1 / nat: the margin h is led to 1 / (2 beta) nats and no further.

    Returns: (loss in nats^2, metrics as for `dpo`).
    """
    chosen_B, rejected_B = policy_chosen_B - reference_chosen_B, policy_rejected_B - reference_rejected_B
    loss_B = (chosen_B - rejected_B - 1 / (2 * beta)).square()
    return loss_B.sum() / denominator, _compare(beta * chosen_B, beta * rejected_B, denominator)


def simpo(
    chosen_B: Tensor,
    rejected_B: Tensor,
    chosen_lengths_B: Tensor,
    rejected_lengths_B: Tensor,
    beta: float,
    gamma: float,
    denominator: float | Tensor,
) -> tuple[Tensor, Metrics]:
    """Simple preference optimisation, without a reference:
    (1 / denominator) * sum -log sigmoid(beta * chosen / |chosen| - beta * rejected / |rejected| - gamma).

    Meng, Xia, Chen 2024 (arXiv 2405.14734), equation 6.

    Args:
        chosen_B, rejected_B: log pi of both responses.
        chosen_lengths_B, rejected_lengths_B: their tokens, at least 1.
        beta: scale of the reward (reward / nat per token).
        gamma: by how much the chosen response is to be ahead (reward).
        denominator: pairs of the whole (global) batch.

    Returns: (loss in nats, metrics); the implied reward is beta * log pi / tokens.
    """
    chosen_B, rejected_B = beta * chosen_B / chosen_lengths_B, beta * rejected_B / rejected_lengths_B
    loss_B = -logsigmoid(chosen_B - rejected_B - gamma)
    return loss_B.sum() / denominator, _compare(chosen_B, rejected_B, denominator)


def orpo(
    chosen_B: Tensor,
    rejected_B: Tensor,
    chosen_lengths_B: Tensor,
    rejected_lengths_B: Tensor,
    beta: float,
    denominator: float | Tensor,
) -> tuple[Tensor, Metrics]:
    """Odds-ratio preference optimisation, without a reference: SFT on the chosen response and a term of odds,
    (1 / denominator) * sum (-log p(chosen) - beta * log sigmoid(log odds(chosen) - log odds(rejected))),
    with log p the mean log-probability of a response's tokens and odds = p / (1 - p).

    Hong, Lee, Thorne 2024 (arXiv 2403.07691), equations 6 and 7, whose lambda is beta here. p is bounded to exp(-1e-6).

    Args:
        chosen_B, rejected_B: log pi of both responses.
        chosen_lengths_B, rejected_lengths_B: their tokens, at least 1.
        beta: weight of the term of odds.
        denominator: pairs of the whole (global) batch.

    Returns: (loss in nats, metrics); the implied reward is log odds.
    """
    odds_B, other_B = _log_odds(chosen_B / chosen_lengths_B), _log_odds(rejected_B / rejected_lengths_B)
    loss = -beta * logsigmoid(odds_B - other_B).sum() / denominator
    return loss + mean_nll(chosen_B, chosen_lengths_B, denominator), _compare(odds_B, other_B, denominator)


def mean_nll(logprobs_B: Tensor, lengths_B: Tensor, denominator: float | Tensor) -> Tensor:
    """The likelihood term beside a preference loss: -(1 / denominator) * sum_b log pi[b] / tokens[b].

    On the chosen responses it keeps them likely where a loss of differences lets both fall. Pang et al. 2024 (iterative
    reasoning preference optimisation, arXiv 2404.19733), equation 1, there over the tokens of prompt and response; the
    Llama 3 report (arXiv 2407.21783), section 4.1.4, adds it with the coefficient 0.2.

    Args:
        logprobs_B: log pi of the responses.
        lengths_B: their tokens, at least 1.
        denominator: responses of the whole (global) batch.

    Returns: a scalar in nats per token.
    """
    return -(logprobs_B / lengths_B).sum() / denominator


def kto_baseline(policy_B: Tensor, reference_B: Tensor) -> Tensor:
    """KTO's reference point z0 = max(0, mean_b log(pi / pi_ref)(y'[b] | x[b])), detached, in nats.

    An estimate of KL(pi || pi_ref) from responses y' of other prompts (paper of `kto`, section 4). There the mean is
    over a device's micro-batch; here the whole batch is given at once, so that no split changes it.

    Args:
        policy_B, reference_B: log-probabilities of the mismatched responses of the whole batch.
    """
    return (policy_B - reference_B).mean().clamp(min=0).detach()


def kto(
    policy_B: Tensor,
    reference_B: Tensor,
    desirable_B: Tensor,
    baseline: Tensor,
    beta: float,
    weights: tuple[float, float],
    counts: tuple[int, int],
) -> tuple[Tensor, Metrics]:
    """Kahneman-Tversky optimisation of unpaired thumbs: with r = log(pi / pi_ref), n desirable and m other responses,
    (1 / (n + m)) * (w_n sum_desirable (1 - sigmoid(beta (r - z0))) + w_m sum_others (1 - sigmoid(beta (z0 - r)))).

    Ethayarajh et al. 2024 (arXiv 2402.01306), section 4, whose lambda_D and lambda_U are the weights here.

    Args:
        policy_B, reference_B: log pi and log pi_ref of the responses.
        desirable_B: bool, True for a thumb up.
        baseline: z0 of `kto_baseline`, nats.
        beta: strength of the pull towards the reference (reward / nat).
        weights: of desirable and of other responses.
        counts: n and m of the whole (global) batch; one of them may be 0.

    Returns: (loss, at most the larger weight; metrics). The implied reward is beta * r; `accuracy` is the share of
    responses on their own side of the baseline (on it: half); the means of a kind that the batch lacks are 0.
    """
    reward_B = beta * (policy_B - reference_B)
    side_B = torch.where(desirable_B, 1.0, -1.0)
    ahead_B = side_B * (reward_B - beta * baseline)
    weight_B = torch.where(desirable_B, weights[0], weights[1])
    total = sum(counts)
    loss = (weight_B * torch.sigmoid(-ahead_B)).sum() / total
    with torch.no_grad():
        chosen = torch.where(desirable_B, reward_B, 0.0).sum() / max(1, counts[0])
        rejected = torch.where(desirable_B, 0.0, reward_B).sum() / max(1, counts[1])
        accuracy = _positive(ahead_B).sum() / total
    return loss, {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "margin": chosen - rejected,
        "accuracy": accuracy,
    }


def _log_odds(logp_B: Tensor) -> Tensor:
    logp_B = logp_B.clamp(max=SURE)
    return logp_B - torch.log(-torch.expm1(logp_B))


def _positive(x_B: Tensor) -> Tensor:
    return (x_B > 0).float() + 0.5 * (x_B == 0).float()


@torch.no_grad()
def _compare(chosen_B: Tensor, rejected_B: Tensor, denominator: float | Tensor) -> Metrics:
    chosen, rejected = chosen_B.sum() / denominator, rejected_B.sum() / denominator
    accuracy = _positive(chosen_B - rejected_B).sum() / denominator
    return {"reward_chosen": chosen, "reward_rejected": rejected, "margin": chosen - rejected, "accuracy": accuracy}
