"""Settings of `keel classic`. No torch here: a wrong setting is refused at once.

Null stands for the published setting of the algorithm and kind of action, which `ClassicConfig.resolved` fills in.
CleanRL (Huang et al. 2022, JMLR 23(274)) is the source of PPO's: its ppo.py for discrete actions, its
ppo_continuous_action.py for continuous ones; the numbers are those of Baselines' ppo2.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from keel.config import Fraction, NonNegative, Positive, Rate, Section, Threads

Algorithm = Literal["ppo", "trpo", "reinforce"]
Actions = Literal["discrete", "continuous"]

CRITIC_ONLY = ("critic_learning_rate", "critic_epochs", "critic_batch")
"""Settings of a critic that is fitted by itself, after the policy's step."""


class ClassicConfig(Section):
    """Training of one policy on one gymnasium task."""

    env: str
    """A gymnasium id, such as CartPole-v1."""
    algorithm: Algorithm = "ppo"
    """ppo: several epochs of clipped steps. trpo: one natural-gradient step inside a KL bound. reinforce: one step of
    the plain policy gradient over whole episodes."""
    steps: Positive = 500_000
    """At least so many, of all environments together: the rollout in which they are reached is the last one."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of everything random: same machine, same seed, same bytes."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The run folder's name under `root`. Null: environment, algorithm and seed."""
    root: str = "runs"
    """Where run folders are made."""
    threads: Threads = 1
    """CPU threads. Networks this small lose by more."""
    environments: Positive | None = None
    """Environments side by side. Null: 4 with discrete actions, 1 with continuous [CleanRL]."""
    rollout: Positive | None = None
    """Steps of each environment before an update. Null: ppo 128 with discrete actions, 2048 with continuous [CleanRL];
    trpo 512 and 2048; reinforce 1, as it plays each episode to its end in any case."""
    gamma: Fraction = 0.99
    """Discount per step [CleanRL]."""
    lam: Fraction | None = None
    """Lambda of GAE; ppo and trpo. Null: 0.95 [CleanRL; Schulman et al. 2016]."""
    hidden: tuple[Positive, ...] = (64, 64)
    """Widths of the tanh layers of policy and critic [CleanRL]."""
    trunk: Literal["separate", "shared"] | None = None
    """ppo: whether policy and critic have layers of their own. Null: separate [CleanRL]."""
    learning_rate: Rate | None = None
    """Adam, of the policy, and in ppo of the critic with it; ppo and reinforce. Null: ppo 2.5e-4 with discrete actions,
    3e-4 with continuous [CleanRL]; reinforce 1e-2 and 3e-3 [docs/classic.md]."""
    anneal: bool = True
    """Learning rates fall linearly to 0 over `steps` [CleanRL]."""
    max_grad_norm: Rate = 0.5
    """Gradients are scaled down to this norm before a step of Adam [CleanRL]."""
    whiten: bool = True
    """Advantages get mean 0 and sd 1 over the batch of each policy step [CleanRL: per minibatch]."""
    entropy: NonNegative | None = None
    """Weight of the entropy bonus; ppo and reinforce. Null: 0.01 with discrete actions, 0 with continuous [CleanRL]."""
    normalise_observations: bool | None = None
    """Observations get mean 0 and sd 1 over all seen before the rollout, bounded to +-10. Null: with continuous actions
    [CleanRL]."""
    normalise_rewards: bool | None = None
    """Rewards are divided by the sd of the running discounted return, bounded to +-10. Null: with continuous actions
    [CleanRL]."""
    clip: Rate | None = None
    """ppo: clip range of the ratio. Null: 0.2 [CleanRL]."""
    value_clip: bool | None = None
    """ppo: values are clipped by the same range around those before the update. Null: yes [CleanRL]."""
    value_coefficient: Rate | None = None
    """ppo: weight of the value loss in the sum. With trunks apart it matters where gradients are scaled down, since
    their norm is of both networks. Null: 0.5 [CleanRL]."""
    epochs: Positive | None = None
    """ppo: passes over each rollout. Null: 4 with discrete actions, 10 with continuous [CleanRL]."""
    minibatches: Positive | None = None
    """ppo: steps of Adam per epoch. Null: 4 with discrete actions, 32 with continuous [CleanRL]."""
    max_kl: Rate | None = None
    """trpo: mean KL(old || new) of a step, nats per step of the environment. Null: 0.01 [arXiv:1502.05477, table 2]."""
    cg_iterations: Positive | None = None
    """trpo: conjugate-gradient iterations. Null: 10 [arXiv:1502.05477, appendix C]."""
    cg_damping: NonNegative | None = None
    """trpo: added to the Fisher matrix's diagonal. Null: 0.1 [Baselines' trpo_mpi]."""
    line_search_shrink: Annotated[float, Field(gt=0, lt=1)] | None = None
    """trpo: a step that fails is shortened by this factor. Null: 0.8 [Spinning Up]."""
    line_search_attempts: Positive | None = None
    """trpo: steps tried before the policy is left as it was. Null: 10 [Spinning Up]."""
    baseline: Literal["value", "none"] | None = None
    """reinforce: what is taken from the return: a critic's value or nothing. Null: value."""
    critic_learning_rate: Rate | None = None
    """Adam; trpo, and reinforce with a baseline. Null: 1e-3 [Spinning Up]."""
    critic_epochs: Positive | None = None
    """Passes of the critic over each rollout; where critic_learning_rate stands. Null: 10 [sb3-contrib's TRPO]."""
    critic_batch: Positive | None = None
    """Steps per gradient step of the critic; where critic_learning_rate stands. Null: 128 [sb3-contrib's TRPO]."""

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained at all."""
        return self.algorithm != "reinforce" or self.baseline != "none"

    @property
    def run_name(self) -> str:
        """`name`, or one made of environment, algorithm and seed."""
        plain = "".join(c if c.isalnum() or c in "._-" else "-" for c in self.env).lstrip("._-")
        return self.name or f"{plain}-{self.algorithm}-seed{self.seed}"

    @model_validator(mode="after")
    def _useful(self) -> Self:
        for field, (algorithms, reason) in _ONLY.items():
            if getattr(self, field) is not None and self.algorithm not in algorithms:
                raise ValueError(f"{field} does nothing with algorithm {self.algorithm}: {reason}; remove it")
        for field in CRITIC_ONLY:
            if getattr(self, field) is not None and not self.has_critic:
                raise ValueError(f"{field} does nothing with baseline none: there is no critic; remove it")
        if not self.env:
            raise ValueError("env is the id of a gymnasium environment, such as CartPole-v1")
        return self

    def resolved(self, actions: Actions) -> "ClassicConfig":
        """A copy in which every null that this algorithm reads is filled in.

        Raises:
            ValueError: steps are fewer than one rollout takes, or a rollout has fewer steps than minibatches.
        """
        used = {name: value for name, value in _published(self.algorithm, actions).items() if self._reads(name)}
        given = {name: value for name in used if (value := getattr(self, name)) is not None}
        copy = self.model_copy(update={"name": self.run_name, **used, **given})
        assert copy.environments and copy.rollout
        size = copy.environments * copy.rollout
        if size > copy.steps:
            raise ValueError(
                f"steps {copy.steps} are fewer than one rollout takes: environments {copy.environments} x rollout "
                f"{copy.rollout} = {size}"
            )
        if (copy.minibatches or 1) > size:
            raise ValueError(f"minibatches {copy.minibatches} is more than the {size} steps of a rollout")
        return copy

    def _reads(self, field: str) -> bool:
        algorithms, _ = _ONLY.get(field, ((self.algorithm,), ""))
        return self.algorithm in algorithms and (self.has_critic or field not in CRITIC_ONLY)


_PPO = (("ppo",), "it belongs to ppo's loss over several minibatches of one rollout")
_TRPO = (("trpo",), "it belongs to trpo's trust region")
_FITTED = (("trpo", "reinforce"), "ppo's critic takes its steps with the policy: learning_rate, epochs and minibatches")
_ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    "lam": (("ppo", "trpo"), "it takes whole returns, which is lambda 1"),
    "trunk": (("ppo",), "its policy and critic take steps of their own, and so have layers of their own"),
    "learning_rate": (("ppo", "reinforce"), "the length of the policy's step follows from max_kl"),
    "entropy": (("ppo", "reinforce"), "the policy follows the natural gradient of the surrogate alone"),
    "clip": (("ppo",), "no ratio is clipped"),
    "value_clip": _PPO,
    "value_coefficient": _PPO,
    "epochs": _PPO,
    "minibatches": _PPO,
    "max_kl": _TRPO,
    "cg_iterations": _TRPO,
    "cg_damping": _TRPO,
    "line_search_shrink": _TRPO,
    "line_search_attempts": _TRPO,
    "baseline": (("reinforce",), "its advantages always come from a critic"),
    **dict.fromkeys(CRITIC_ONLY, _FITTED),
}
"""Settings that only some algorithms read, and why the others do not."""


def _published(algorithm: Algorithm, actions: Actions) -> dict[str, Any]:
    discrete = actions == "discrete"
    rollout = {"ppo": 128 if discrete else 2048, "trpo": 512 if discrete else 2048, "reinforce": 1}
    rate = {"ppo": 2.5e-4 if discrete else 3e-4, "reinforce": 1e-2 if discrete else 3e-3}
    return {
        "environments": 4 if discrete else 1,
        "rollout": rollout[algorithm],
        "lam": 0.95,
        "trunk": "separate",
        "learning_rate": rate.get(algorithm),
        "entropy": 0.01 if discrete else 0.0,
        "normalise_observations": not discrete,
        "normalise_rewards": not discrete,
        "clip": 0.2,
        "value_clip": True,
        "value_coefficient": 0.5,
        "epochs": 4 if discrete else 10,
        "minibatches": 4 if discrete else 32,
        "max_kl": 0.01,
        "cg_iterations": 10,
        "cg_damping": 0.1,
        "line_search_shrink": 0.8,
        "line_search_attempts": 10,
        "baseline": "value",
        "critic_learning_rate": 1e-3,
        "critic_epochs": 10,
        "critic_batch": 128,
    }
