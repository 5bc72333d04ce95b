"""The loop of supervised stages (sandbox pretraining, SFT, reward model): seeded batches, one loss, one optimizer."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keel.config import PreferenceConfig, RewardConfig, SftConfig, SourceConfig
from keel.data.stream import batch_rows, mixture_of, steps_for
from keel.errors import NumberError
from keel.models.roles import Role, Roles
from keel.runs.files import not_finite
from keel.runs.folder import StageFolder
from keel.train.context import Run, Session
from keel.train.numbers import rows_at_fault, told_prompt
from keel.train.optim import guarded_step, linear_rate, make_optimizer, set_rate
from keel.types import Prompt


@dataclass(frozen=True)
class Plan:
    """How long and how fast: optimizer steps, rows a step, peak rate, share of warm-up, gradient bound, saving,
    the share until which the peak is held, the metric whose best checkpoint is kept, and where the rows are from."""

    steps: int
    batch: int
    learning_rate: float
    warmup: float
    max_grad_norm: float
    checkpoint_every: int
    hold: float = 0.0
    keep_best: str | None = None
    source: SourceConfig | None = None

    @classmethod
    def of(cls, settings: SftConfig | RewardConfig | PreferenceConfig, rows: int) -> "Plan":
        """As a stage's section says, for so many rows. Raises DataError where the batch is larger than that."""
        assert settings.learning_rate is not None
        return cls(
            steps_for(rows, settings.batch, settings.epochs),
            settings.batch,
            settings.learning_rate,
            settings.warmup,
            settings.max_grad_norm,
            settings.checkpoint_every,
            keep_best=settings.keep_best,
            source=settings.data,
        )


def fit(
    run: Run,
    stage: StageFolder,
    title: str,
    roles: Roles,
    role: Role,
    rows: Sequence[Prompt],
    plan: Plan,
    step_loss: Callable[[list[int]], dict[str, float]],
    held_out: Callable[[], dict[str, float]],
    lengths: Sequence[int] | None = None,
) -> dict[str, float]:
    """Trains one role and returns the held-out numbers at the end.

    rows: the prompt of each row, by which errors name it.
    step_loss: given row numbers, adds the gradient of their mean loss and returns metrics.
    held_out: the numbers on rows kept back; called at every checkpoint and at the end.
    lengths: tokens of every row. Given, rows of similar length share a step: less padding where a step is a single
        micro-batch. Not for a mean over tokens of unlike rows: a token of a short row would weigh more.
    Goes on from the newest checkpoint. Raises Interrupted, NumberError, RunError; DataError where batch > rows.
    """
    parameters = roles.parameters(role)
    optimizer = make_optimizer(parameters.values(), beta2=0.99, eps=1e-8)  # the usual ones of pretraining
    session = Session(run, stage, roles, {"optimizer": optimizer}, plan.checkpoint_every, best=plan.keep_best)
    numbers: dict[str, float] = {}
    mixture = mixture_of(plan.source, rows)
    with session, run.console.task(title, plan.steps, start=session.step) as task:
        while session.step < plan.steps:
            began = time.monotonic()
            rate = linear_rate(session.step, plan.steps, plan.learning_rate, plan.warmup, plan.hold)
            set_rate(optimizer, rate)
            some = batch_rows(len(rows), plan.batch, session.step, run.recipe.seed, lengths, mixture)
            values: dict[str, float] = {}
            where = f"{stage.path.name}, step {session.step + 1}"
            try:
                found = step_loss(some)
                if bad := not_finite(found):
                    raise NumberError(f"{bad} is not finite; no weight was changed", where=where)
                norm = guarded_step({role: optimizer}, {role: plan.max_grad_norm}, where)
                values = {**found, "grad_norm": norm[role]}
            except NumberError as error:
                if not error.final:
                    error.rows = rows_at_fault(some, step_loss, parameters.values())
                session.bad_step(error, [told_prompt(row, rows[row]) for row in some])
            session.step += 1
            last = session.step == plan.steps
            if last or session.step % plan.checkpoint_every == 0:
                numbers = held_out()
            session.log(
                {
                    **values,
                    "learning_rate": rate,
                    "seconds": time.monotonic() - began,
                    **(numbers if last or session.step % plan.checkpoint_every == 0 else {}),
                }
            )
            task.update(session.step, **{n: v for n, v in values.items() if n != "grad_norm"}, **numbers)
            session.end_step(last)
    return numbers or held_out()
