"""Rows and advantages: episodes do not leak into each other, and a time limit is no end."""

import numpy as np
import pytest
import torch

from keel.classic.environments import Environments
from keel.classic.experience import make_experience
from keel.classic.networks import ActorCritic
from keel.classic.rollout import Episodes, Rollout, Row, Sampler, play
from tests.classic import tasks

assert tasks


def network(value: float = 0.0, observations: int = 1) -> ActorCritic:
    """A uniform policy over two actions whose critic says `value` everywhere."""
    made = ActorCritic(observations, "discrete", 2, [], "separate", torch.Generator().manual_seed(0))
    assert made.value_head is not None
    with torch.no_grad():
        made.value_head.weight.zero_()
        made.value_head.bias.fill_(value)
    return made


def played(env: str, count: int, steps: int, whole: bool = False, episodes: Episodes | None = None) -> Rollout:
    rollout = play(Environments(env, count, 0), network(), None, steps, whole, torch.Generator().manual_seed(0))
    if episodes:
        episodes.add(rollout)
    return rollout


def learnt(rollout: Rollout, critic: ActorCritic, gamma: float, lam: float):
    rewards_N = torch.from_numpy(rollout.packed(rollout.rewards_TE).astype(np.float32))
    return make_experience(critic, rollout, rewards_N, None, gamma, lam)


def test_an_end_and_a_time_limit_by_hand():
    # Rewards 1, 2, 3, V = 10 everywhere, gamma 1/2, lambda 1. The last step pays 3, and after a time limit V of what
    # came next is worth 5 more: returns from the back 3, 2 + 1.5, 1 + 1.75 against 8, 2 + 4, 1 + 3.
    critic = network(10.0)
    ended = learnt(played("KeelEnds3-v0", 1, 3), critic, 0.5, 1.0)
    limited = learnt(played("KeelLimit3-v0", 1, 3), critic, 0.5, 1.0)
    both = learnt(played("KeelBoth3-v0", 1, 3), critic, 0.5, 1.0)
    torch.testing.assert_close(ended.returns_N, torch.tensor([2.75, 3.5, 3.0]))
    torch.testing.assert_close(limited.returns_N, torch.tensor([4.0, 6.0, 8.0]))
    torch.testing.assert_close(both.returns_N, ended.returns_N)  # an end at the limit is an end
    torch.testing.assert_close(limited.advantages_N, limited.returns_N - 10.0)


def test_the_value_after_a_limit_is_of_the_last_observation_not_of_the_next_episode():
    critic = network()
    assert critic.value_head is not None
    with torch.no_grad():
        critic.value_head.weight.fill_(100.0)  # V = 100 t
    limited = learnt(played("KeelLimit3-v0", 1, 4), critic, 0.5, 0.0)
    # delta_t = r_t + gamma V(t) - V(t - 1); the fourth step is the next episode's first, cut by the rollout's end.
    torch.testing.assert_close(limited.advantages_N, torch.tensor([51.0, 2.0, -47.0, 51.0]))


def test_rows_by_hand():
    rollout = played("KeelEnds3-v0", 2, 5)
    assert [row[:4] for row in rollout.rows] == [(0, 0, 3, True), (0, 3, 5, False), (1, 0, 3, True), (1, 3, 5, False)]
    assert [row.last_O.tolist() for row in rollout.rows if not row.terminated] == [[2.0], [2.0]]
    assert rollout.packed(rollout.observations_TEO)[:, 0].tolist() == [0, 1, 2, 0, 1] * 2
    assert rollout.packed(rollout.rewards_TE).tolist() == [1, 2, 3, 1, 2] * 2
    assert rollout.steps == 10


def test_whole_episodes():
    # After 4 steps each environment is one step into its second episode, and plays that one to its end.
    rollout = played("KeelEnds3-v0", 2, 4, whole=True)
    assert [row[:4] for row in rollout.rows] == [(0, 0, 3, True), (0, 3, 6, True), (1, 0, 3, True), (1, 3, 6, True)]
    assert rollout.steps == 12


def test_an_environment_that_has_finished_stands_still():
    environments = Environments("KeelEnds3-v0", 2, 0)
    environments.step(np.zeros(2, np.int64), [0])  # the first is one step ahead
    rollout = play(environments, network(), None, 1, True, torch.Generator().manual_seed(0))
    assert rollout.playing_TE.tolist() == [[True, True], [True, True], [False, True]]
    assert [row[:3] for row in rollout.rows] == [(0, 0, 2), (1, 0, 3)]
    assert rollout.packed(rollout.rewards_TE).tolist() == [2, 3, 1, 2, 3]
    assert environments.observations_EO.tolist() == [[0.0], [0.0]]


def test_episodes_over_rollouts():
    episodes = Episodes()
    environments = Environments("KeelEnds3-v0", 2, 0)
    for _ in range(2):
        episodes.add(play(environments, network(), None, 2, False, torch.Generator().manual_seed(0)))
    assert (episodes.count, list(episodes.returns), list(episodes.lengths)) == (2, [6.0, 6.0], [3, 3])
    assert episodes.means() == {"episode_return": 6.0, "episode_length": 3.0}
    assert Episodes().means() == {}


def random_rollout(seed: int, steps: int = 40, count: int = 3) -> tuple[Rollout, np.ndarray, np.ndarray]:
    """(rollout with ends and limits strewn in, terminated_TE, last observation of each step)."""
    random = np.random.default_rng(seed)
    seen, after = random.normal(size=(steps, count, 2)), random.normal(size=(steps, count, 2))
    terminated, truncated = random.random((steps, count)) < 0.15, random.random((steps, count)) < 0.15
    ended = terminated | truncated
    rows = []
    for e in range(count):
        start = 0
        for t in range(steps):
            if ended[t, e] or t == steps - 1:
                rows.append(Row(e, start, t + 1, bool(terminated[t, e]), after[t, e]))
                start = t + 1
    actions = random.integers(0, 2, (steps, count))
    rewards, playing = random.normal(size=(steps, count)), np.ones((steps, count), bool)
    for row in rows:  # what a step leads to is what the next one sees
        after[row.start : row.stop - 1, row.environment] = seen[row.start + 1 : row.stop, row.environment]
    return Rollout(seen, actions, rewards, ended, playing, rows), terminated, after


@pytest.mark.parametrize("seed", range(4))
def test_a_plain_loop_over_episodes_gives_the_same(seed: int):
    gamma, lam = 0.9, 0.8
    rollout, terminated_TE, after_TEO = random_rollout(seed)
    critic = ActorCritic(2, "discrete", 2, [5], "separate", torch.Generator().manual_seed(seed))
    found = learnt(rollout, critic, gamma, lam)
    with torch.no_grad():
        values = [
            critic.values(torch.from_numpy(x[:, :, 0:2].reshape(-1, 2).astype(np.float32)))
            for x in (rollout.observations_TEO, after_TEO)
        ]
    now_TE, next_TE = (v.double().numpy().reshape(rollout.rewards_TE.shape) for v in values)
    expected_TE = np.zeros_like(rollout.rewards_TE)
    for e in range(expected_TE.shape[1]):
        running = 0.0
        for t in reversed(range(len(expected_TE))):
            if rollout.ended_TE[t, e]:
                running = 0.0
            follows = 0.0 if terminated_TE[t, e] else next_TE[t, e]
            running = rollout.rewards_TE[t, e] + gamma * follows - now_TE[t, e] + gamma * lam * running
            expected_TE[t, e] = running
    np.testing.assert_allclose(found.advantages_N.numpy(), rollout.packed(expected_TE), atol=1e-5)
    np.testing.assert_allclose(found.returns_N.numpy(), rollout.packed(expected_TE + now_TE), atol=1e-5)


def test_rewards_of_one_episode_move_no_other():
    rollout, _, _ = random_rollout(7)
    critic = network(observations=2)
    before = learnt(rollout, critic, 0.9, 0.8).advantages_N
    row = rollout.rows[2]
    rollout.rewards_TE[row.start : row.stop, row.environment] += 1000.0
    moved = learnt(rollout, critic, 0.9, 0.8).advantages_N != before
    lengths = [r.stop - r.start for r in rollout.rows]
    assert moved.split(lengths)[2].all() and int(moved.sum()) == lengths[2]


def test_without_a_critic_returns_are_plain():
    plain = ActorCritic(1, "discrete", 2, [], None, torch.Generator().manual_seed(0))
    found = learnt(played("KeelLimit3-v0", 1, 3), plain, 0.5, 1.0)
    torch.testing.assert_close(found.advantages_N, torch.tensor([2.75, 3.5, 3.0]))
    assert not found.values_N.any()


@pytest.mark.parametrize("actions", ["discrete", "continuous"])
def test_the_sampler_is_the_network(actions):
    made = ActorCritic(3, actions, 2, [8, 8], None, torch.Generator().manual_seed(1))
    seen = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    sampler = Sampler(made)
    policy = made.policy(seen)
    np.testing.assert_allclose(sampler.scores(seen.numpy()), policy[0].detach().numpy(), atol=1e-6)
    # 40 000 draws at one state have the network's own mean log-probability, minus its entropy.
    seen = seen[:1].expand(40_000, 3)
    policy = made.policy(seen)
    drawn = sampler.sample(seen.numpy(), sampler.noise((40_000, 2), torch.Generator().manual_seed(3)))
    mean = policy.logprobs(torch.from_numpy(drawn)).mean()
    assert mean.item() == pytest.approx(-policy.entropy()[0].item(), abs=0.02)


def test_actions_reach_the_task_in_its_own_range():
    environments = Environments("KeelEnds3-v0", 1, 0)
    environments.step(np.array([1]), [0])
    assert environments._environments[0].unwrapped.actions == [6]  # the space starts at 5
    pushed = Environments("KeelPush4-v0", 1, 0)
    pushed.step(np.array([[-7.0, 7.0]]), [0])
    assert pushed._environments[0].unwrapped.actions[0].tolist() == [-1.0, 0.5]
