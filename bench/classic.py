"""Classic tasks against published figures, and steps per second beside Stable-Baselines3.

    python -m bench.classic learning CartPole-v1 Acrobot-v1 --seeds 1 2 3
    python -m bench.classic learning HalfCheetah-v4 Hopper-v4 InvertedPendulum-v4 --seeds 1 2 3
    python -m bench.classic algorithms --seeds 1 2 3
    python -m bench.classic speed

Standard output gets one JSON object a measurement (bench/common.py), standard error the progress.

`learning`: the mean over seeds of the mean return of the last 100 training episodes; the peer is CleanRL's published
mean of the same (docs.cleanrl.dev, ppo.py and ppo_continuous_action.py), not measured here. Runs are kept under --root,
and a finished one is not run again. `speed`: both libraries in one process, the same task, settings and one
thread, several times in turns; of each the fastest round counts, since whatever else runs on a machine only slows.
Stable-Baselines3 is not a dependency: install it
beside Keel for this, or the peer is null.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

from bench.common import Bounds, line, progress, write
from keel.classic.config import ClassicConfig
from keel.classic.train import Learner, train_classic
from keel.runs.console import Console
from keel.runs.folder import RunFolder
from keel.runs.log import read_lines

PUBLISHED = {
    "CartPole-v1": (490.04, 490.0, 500_000),
    "Acrobot-v1": (-86.36, -86.0, 500_000),
    "HalfCheetah-v4": (1442.64, 1443.0, 1_000_000),
    "Hopper-v4": (2382.86, 2383.0, 1_000_000),
    "InvertedPendulum-v4": (963.09, 963.0, 1_000_000),
}
"""Task: (CleanRL's mean, Keel's goal, steps)."""
PACKAGES = ("keel-rl", "torch", "numpy", "gymnasium", "mujoco", "stable-baselines3")
SPEED_UPDATES, SPEED_ROUNDS = 10, 10
CARTPOLE: dict[str, Any] = {"env": "CartPole-v1", "environments": 4, "rollout": 128, "epochs": 4, "minibatches": 4}


def learning(tasks: list[str], seeds: list[int], root: str, console: Console) -> Iterator[dict[str, Any]]:
    """PPO with its defaults on each task."""
    for task in tasks:
        peer, goal, steps = PUBLISHED[task]
        env = _installed(task)
        results = _runs(f"{env}-ppo", {"env": env, "steps": steps}, seeds, root, console)
        ours = statistics.mean(r["episode_return"] for r in results.values())
        yield line(f"classic/learning/{env}", "return", ours, peer, Bounds("ours >=", goal), _detail(results), PACKAGES)


def algorithms(seeds: list[int], root: str, console: Console) -> Iterator[dict[str, Any]]:
    """The algorithms beside each other on CartPole, within the same steps: the table of docs/classic.md."""
    kinds: dict[str, dict[str, Any]] = {
        "ppo": {},
        "ppo-rate-1e-3": {"learning_rate": 1e-3},
        "trpo": {"algorithm": "trpo"},
        "reinforce": {"algorithm": "reinforce"},
        "reinforce-no-baseline": {"algorithm": "reinforce", "baseline": "none"},
    }
    for name, settings in kinds.items():
        settings |= {"env": "CartPole-v1", "steps": 100_000}
        results = _runs(f"algorithms-{name}", settings, seeds, root, console)
        ours = statistics.mean(r["episode_return"] for r in results.values())
        yield line(f"classic/algorithms/{name}", "return", ours, detail=_detail(results), packages=PACKAGES)


def speed(console: Console) -> Iterator[dict[str, Any]]:
    """PPO on CartPole: steps per second, playing and learning together."""
    ours, theirs = [], []
    for number in range(SPEED_ROUNDS):
        ours.append(_keel_speed())
        if util.find_spec("stable_baselines3"):
            theirs.append(_peer_speed())
        console.line(f"round {number + 1}: {ours[-1]:.0f} steps per second, peer {theirs[-1:] or None}")
    mine, peer = max(ours), max(theirs, default=None)
    detail = {"ours": ours, "peer": theirs}
    yield line("classic/speed/CartPole-v1", "steps/s", mine, peer, Bounds("ratio >=", 2.0), detail, PACKAGES)


def _keel_speed() -> float:
    learner = Learner(ClassicConfig(**CARTPOLE).resolved("discrete"))
    learner.update()
    before, start = learner.steps, time.perf_counter()
    for _ in range(SPEED_UPDATES):
        learner.update()
    return (learner.steps - before) / (time.perf_counter() - start)


def _peer_speed() -> float:
    # By name: a checker or reader without Stable-Baselines3 has nothing to resolve.
    make_vec_env = import_module("stable_baselines3.common.env_util").make_vec_env
    size = CARTPOLE["environments"] * CARTPOLE["rollout"]
    model = import_module("stable_baselines3").PPO(
        "MlpPolicy",
        make_vec_env(CARTPOLE["env"], CARTPOLE["environments"], seed=0),
        n_steps=CARTPOLE["rollout"],
        batch_size=size // CARTPOLE["minibatches"],
        n_epochs=CARTPOLE["epochs"],
        learning_rate=2.5e-4,
        clip_range_vf=0.2,
        ent_coef=0.01,
        device="cpu",
        seed=0,
    )
    model.learn(size)
    start = time.perf_counter()
    model.learn(size * SPEED_UPDATES)
    return size * SPEED_UPDATES / (time.perf_counter() - start)


def _runs(
    name: str, settings: dict[str, Any], seeds: list[int], root: str, console: Console
) -> dict[int, dict[str, Any]]:
    results = {}
    for seed in seeds:
        config = ClassicConfig(**settings, seed=seed, root=root, name=f"{name}-seed{seed}")
        with RunFolder.open(config.root, config.run_name) as folder:
            results[seed] = train_classic(config, folder, console, "python -m bench.classic") | _from_log(config)
    return results


def _from_log(config: ClassicConfig) -> dict[str, float | None]:
    """KL per update, mean and largest, and the steps after which the last 100 episodes first had a mean of 475."""
    lines = list(read_lines(Path(config.root) / config.run_name / "classic" / "metrics.jsonl"))
    kl = [line["update_kl"] for line in lines]
    solved = (line["environment_steps"] for line in lines if line["episodes"] >= 100 and line["episode_return"] >= 475)
    return {"kl_mean": statistics.mean(kl), "kl_max": max(kl), "steps_to_475": next(solved, None)}


def _detail(results: dict[int, dict[str, Any]]) -> dict[str, Any]:
    names = ("episode_return", "seconds", "cpu_seconds", "updates", "kl_mean", "kl_max", "steps_to_475")
    return {"seeds": list(results), **{name: [r.get(name) for r in results.values()] for name in names}}


def _installed(task: str) -> str:
    """The task itself, or the next version of it where gymnasium has dropped this one; the name then says so."""
    import gymnasium

    known = gymnasium.registry
    return task if task in known else f"{task.rsplit('-v', 1)[0]}-v5"


def main() -> None:
    """Parses the command line and prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learning", "algorithms", "speed"))
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=", ".join(PUBLISHED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--root", default="runs/bench", help="where runs are kept")
    arguments = parser.parse_args()
    unknown = set(arguments.tasks) - PUBLISHED.keys()
    if unknown:
        parser.error(f"no published figure for {', '.join(sorted(unknown))}; there are {', '.join(PUBLISHED)}")
    console = progress()
    import torch

    torch.set_num_threads(1)
    if arguments.what == "learning":
        lines = learning(arguments.tasks or ["CartPole-v1", "Acrobot-v1"], arguments.seeds, arguments.root, console)
    elif arguments.what == "algorithms":
        lines = algorithms(arguments.seeds, arguments.root, console)
    else:
        lines = speed(console)
    for result in lines:
        write(result)


if __name__ == "__main__":
    main()
