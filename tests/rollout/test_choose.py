"""Drawing a token: by hand, and against the plain cumulative distribution."""

import numpy as np
import pytest
import torch

from keel.rollout.choose import BLOCK, choose


def test_by_hand():
    """Probabilities 1/2, 1/4, 0, 1/4: the unit interval is cut at 1/2 and 3/4."""
    noise = np.array([0.0, 0.499, 0.5, 0.749, 0.75, 0.999])
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.0, 0.25]])).expand(6, 4) + 3.0
    tokens, logprobs = choose(logits, 1.0, noise)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]))


def test_temperature_by_hand():
    """At temperature 1/2 the odds 1 : 2 become 1 : 4; at 0 the likeliest is taken, with its unchanged probability."""
    logits = torch.log(torch.tensor([[1 / 3, 2 / 3]]))
    tokens, logprobs = choose(logits.expand(2, 2), 0.5, np.array([0.19, 0.21]))
    assert tokens.tolist() == [0, 1]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.2, 0.8]))
    tokens, logprobs = choose(logits, 0.0, np.array([0.0]))
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([2 / 3]))


@pytest.mark.parametrize("vocabulary", [5, BLOCK, 2 * BLOCK + 17])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_is_the_inverse_of_the_cumulative_distribution(vocabulary, temperature):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(2000, vocabulary, generator=generator)
    noise = np.random.default_rng(0).random(2000)
    tokens, logprobs = choose(logits, temperature, noise)
    plain = torch.log_softmax(logits.double() / temperature, -1)
    ends = plain.exp().cumsum(-1)
    inside = torch.searchsorted(ends / ends[:, -1:], torch.from_numpy(noise)[:, None], right=True)[:, 0]
    assert (tokens != inside).sum() <= 1  # a number that falls on a boundary, to the seventh digit
    torch.testing.assert_close(logprobs, plain.gather(1, tokens[:, None])[:, 0].float(), atol=1e-5, rtol=1e-5)


def test_the_last_tokens_of_a_large_vocabulary_keep_their_share():
    """100 000 tokens of 1e-8 behind one of almost 1: a float32 running sum would never leave the first."""
    logits = torch.full((1, 100_001), 1e-8).log()
    logits[0, 0] = np.log1p(-1e-3)
    tokens, _ = choose(logits.expand(3, -1), 1.0, np.array([0.9989, 0.9991, 1 - 2**-53]))
    assert tokens[0] == 0 and abs(int(tokens[1]) - 10_000) < 200 and tokens[2] == 100_000


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((64, 3 * BLOCK), -torch.inf)
    logits[:, [3, BLOCK + 9]] = 0.0
    tokens, _ = choose(logits, 1.0, np.concatenate([np.linspace(0, 0.999, 63), [1 - 2**-53]]))
    assert set(tokens.tolist()) == {3, BLOCK + 9}
