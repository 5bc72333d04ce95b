"""The source of rewards that a recipe names."""

from keel.config import PpoConfig, is_remote
from keel.rewards.functions import FunctionReward
from keel.rewards.remote import RemoteReward, Requests


def reward_named(ppo: PpoConfig) -> FunctionReward | RemoteReward:
    """A function or a remote scorer. Raises RewardError where there is none, or its token is missing."""
    scoring = ppo.scoring
    if is_remote(ppo.reward):
        requests = Requests(scoring.timeout, scoring.retries, scoring.rows_per_request, scoring.token_env)
        return RemoteReward(ppo.reward, requests, scoring.max_failed)
    return FunctionReward.named(ppo.reward, scoring.timeout, scoring.max_failed)
