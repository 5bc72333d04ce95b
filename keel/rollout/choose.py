"""Drawing a token from logits in one pass over the vocabulary."""

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
"""Tokens whose probabilities are summed together before the cumulative sum: about the root of a large vocabulary."""


def choose(logits_BV: Tensor, temperature: float, noise_B: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draws by inverting the cumulative distribution at one uniform number a row; returns tokens and log-probabilities.

    The block is found first, then the token in it. The cumulative sums run in float64, so that rare tokens at the end
    of a large vocabulary keep their share. Temperature 0 takes the likeliest token; its log-probability is then that of
    the unchanged distribution.
    """
    rows, vocabulary = logits_BV.shape
    logits_BV = logits_BV.float()
    top_B1, likeliest_B1 = logits_BV.max(-1, keepdim=True)
    weights = logits_BV.new_empty(rows, -(-vocabulary // BLOCK) * BLOCK)  # exp((logit - top) / temperature)
    weights[:, vocabulary:] = 0
    inside_BV = torch.sub(logits_BV, top_B1, out=weights[:, :vocabulary])
    if temperature not in (0, 1):
        inside_BV.div_(temperature)
    inside_BV.exp_()
    blocks = weights.view(rows, -1, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    total_B1 = sums[:, -1:]
    tokens_B1 = likeliest_B1
    if temperature:
        target_B1 = torch.from_numpy(noise_B).to(sums.device)[:, None] * total_B1
        block_B1 = torch.searchsorted(sums, target_B1, right=True).clamp_max(sums.shape[1] - 1)
        before_B1 = torch.where(block_B1 > 0, sums.gather(1, (block_B1 - 1).clamp_min(0)), 0.0)
        # As a share of the block: its sum in float32 is not to the last digit the end of the cumulative sum in it.
        share_B1 = (target_B1 - before_B1) / (sums.gather(1, block_B1) - before_B1)
        within = blocks[torch.arange(rows, device=sums.device), block_B1[:, 0]].double().cumsum(-1)
        place_B1 = torch.searchsorted(within, share_B1 * within[:, -1:], right=True).clamp_max(BLOCK - 1)
        tokens_B1 = (block_B1 * BLOCK + place_B1).clamp_max(vocabulary - 1)
    logprobs_B1 = (logits_BV.gather(1, tokens_B1) - top_B1) / (temperature or 1.0) - total_B1.log().float()
    return tokens_B1[:, 0], logprobs_B1[:, 0]
