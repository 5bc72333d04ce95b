"""KL divergence between policy and reference, and the controller of its coefficient."""

from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference): k1 = log pi(a|s) - log pi_ref(a|s).

    Unbiased for tokens sampled from the policy, of high variance, and negative at times (Schulman 2020, "Approximating
    KL divergence"; there x ~ q and k1 = -log r with r = p/q, so q is the policy and p the reference).

    Args:
        logprobs: log-probabilities of the sampled tokens under the policy, nats, any shape.
        ref_logprobs: the same tokens under the reference, same shape and temperature.

    Returns: nats, same shape. No mask is applied: padding stays whatever it was.
    """
    assert logprobs.shape == ref_logprobs.shape, (logprobs.shape, ref_logprobs.shape)
    return logprobs - ref_logprobs


def adaptive_coefficient(coefficient: float, observed_kl: float, target: float, horizon: float, episodes: int) -> float:
    """The KL coefficient after one step of the proportional controller in log space.

        e      = clip(observed_kl / target - 1, -0.2, 0.2)
        beta'  = beta * (1 + e * episodes / horizon)

    Ziegler et al. 2019 (arXiv 1909.08593), section 2.2. The paper writes a constant gain K_beta = 0.1 per update; here
    the gain is episodes / horizon, as in its published code, so that it does not hang on the batch size.

    Args:
        coefficient: beta before the step, reward per nat.
        observed_kl: mean KL of this step's episodes, nats per response.
        target: the KL to settle at, nats per response, larger than 0.
        horizon: episodes over which beta can change by a factor of about e^0.2, larger than 0.
        episodes: responses behind `observed_kl`.

    Returns: beta for the next step. Not finite where `observed_kl` is not a number.
    """
    assert target > 0 and horizon > 0, (target, horizon)
    error = min(max(observed_kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * episodes / horizon)
