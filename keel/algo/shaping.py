"""From one score per response to rewards and returns per token."""

import torch
from torch import Tensor

from keel.algo.advantages import gae


def token_rewards(scores_B: Tensor, kl_BT: Tensor, kl_coefficient: float, mask_BT: Tensor) -> Tensor:
    """Per-token rewards: the KL penalty on every masked token, the score on the last one.

        r[b, t] = -beta * kl[b, t] + score[b] * 1[t is the last masked token of row b]

    Ziegler et al. 2019 (arXiv 1909.08593), equation 2, spread over tokens as in its code. OpenRLHF also leaves the
    penalty on positions outside the mask; here they are 0.

    Args:
        scores_B: reward of each response.
        kl_BT: KL of each token against the reference, nats; read on the mask only.
        kl_coefficient: beta, reward per nat.
        mask_BT: bool, True on response tokens.

    Returns: rewards_BT in units of reward, 0 outside the mask. A row without any token has nowhere to put its score
    and is all 0.
    """
    assert kl_BT.shape == mask_BT.shape and scores_B.shape == mask_BT.shape[:1], (scores_B.shape, kl_BT.shape)
    later_BT = mask_BT.flip(1).cumsum(1).flip(1)  # masked tokens at or after t: 1 from the last one on
    is_last_BT = mask_BT & (later_BT == 1)
    return torch.where(mask_BT, -kl_coefficient * kl_BT, 0.0) + torch.where(is_last_BT, scores_B[:, None], 0.0)


def monte_carlo_returns(rewards_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """Discounted rewards to go: G_t = r_t + gamma * G_{t+1}, over the masked tokens of each row.

    Sutton and Barto 2018, equation 3.9 (there r_t is R_{t+1}). It is GAE with lambda = 1 and a value of 0 everywhere
    (arXiv 1506.02438, equation 18), and so steps over gaps in the mask, as veRL's REINFORCE++ does.

    Args:
        rewards_BT: per-token rewards; read on the mask only.
        mask_BT: bool, True on the tokens that the policy chose.
        gamma: discount per token, 0 to 1.

    Returns: returns_BT in units of reward, detached, 0 outside the mask.
    """
    return gae(rewards_BT, torch.zeros_like(rewards_BT), mask_BT, gamma, 1.0)[0]


def penalise_unfinished(scores_B: Tensor, finished_B: Tensor, penalty: float) -> Tensor:
    """Scores less a penalty where the response did not end by itself: s - penalty * 1[not finished].

    The missing-EOS penalty of Huang et al. 2024 (arXiv 2403.17031), who set such scores to a constant (-1); here, as in
    TRL, it is subtracted, so that among unfinished responses the better one still scores higher.

    Args:
        scores_B: reward of each response.
        finished_B: bool, True where the model chose an end token (finish reason "stop").
        penalty: units of reward, 0 or more.

    Returns: scores_B.
    """
    assert scores_B.shape == finished_B.shape, (scores_B.shape, finished_B.shape)
    return torch.where(finished_B, scores_B, scores_B - penalty)
