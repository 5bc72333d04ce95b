"""What every stage of a run is given, and the start and end that all training loops share: resume, log, checkpoint."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from keel import metrics as registry
from keel.config import Recipe
from keel.errors import Interrupted, KeelError, RunError, StepError
from keel.models.roles import Roles, checkpoint_tensors, restore_tensors
from keel.runs import checkpoint
from keel.runs.console import Console, Task
from keel.runs.files import write_json
from keel.runs.folder import RunFolder, StageFolder
from keel.runs.interrupt import Interrupt
from keel.runs.log import JsonLines, read_lines
from keel.runs.state import flatten_optimizer, restore_optimizer
from keel.train.numbers import damaged_weights

NUMBERS = {"step", *registry.REGISTRY}
SHOWN_ROWS = 4
"""Rows that an error names."""


@dataclass
class Run:
    """One run: its recipe (resolved), folder, terminal, device, and whether the user asked it to stop."""

    recipe: Recipe
    folder: RunFolder
    console: Console
    interrupt: Interrupt
    device: torch.device
    command: str

    def stop_if_asked(self, where: str) -> None:
        """Raises Interrupted when the user asked to stop: for work that is done again from its start."""
        if self.interrupt.requested:
            raise self.interrupted(f"stopped while {where}")

    def interrupted(self, what: str) -> Interrupted:
        """The error that ends a run on request and says how to go on."""
        remedy = f"the same command goes on from there: {self.command}"
        error = Interrupted(what, where=str(self.folder.path), remedy=remedy)
        error.exit_code = 128 + self.interrupt.number
        return error

    def watch(self, task: Task, done_before: int = 0) -> Callable[[int], None]:
        """For the sampler's `progress`: moves the bar, and stops when the user asked to."""

        def progress(done: int) -> None:
            self.stop_if_asked(task.title)
            task.update(done_before + done)

        return progress


@dataclass
class Session:
    """One training loop's memory on disk: metric, sample and event logs, and checkpoints of all that changes.

    Its `with` block closes the logs, however the loop ends.

    state: what the loop itself changes beside weights and optimizers, JSON-like; kept in every checkpoint.
    best: the metric by which the best checkpoint is kept beside the newest; None: none is.
    """

    run: Run
    stage: StageFolder
    roles: Roles
    optimizers: Mapping[str, Optimizer]
    every: int
    state: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    best: str | None = None

    def __post_init__(self) -> None:
        self.metrics, self.samples, self.events = (
            JsonLines(p) for p in (self.stage.metrics, self.stage.samples, self.stage.events)
        )
        self.saved, self.save_seconds = -1, 0.0
        self.state |= {"skipped": 0, "best": {"metric": "", "step": -1, "value": 0.0}}
        self._last: tuple[int, dict[str, float]] = (0, {})
        found = checkpoint.load_latest(self.stage.checkpoints)
        if found:
            self._restore(found)
        for log in (self.metrics, self.samples, self.events):
            log.cut(self.step)
        self._check_metrics()
        if found:
            self.events.append({"step": self.step, "event": "resumed", "passed_over": found.passed_over})
        self.began, self._told_skips = time.monotonic(), self.state["skipped"]

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        try:
            states, loop = found.state["optimizers"], found.state["loop"]
            if states.keys() != self.optimizers.keys() or not _alike(self.state, loop):
                raise ValueError("it is of another kind of training")
            restore_tensors(self.roles, _part(found.tensors, "weights"))
            for name, optimizer in self.optimizers.items():
                restore_optimizer(optimizer, _part(found.tensors, name), states[name])
        except KeelError as error:
            raise self._unfit(found.step, error.what) from error
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            # Whole files that another hand wrote fail in whatever way they are read.
            raise self._unfit(found.step, f"{type(error).__name__}: {error}") from error
        self.state.update(loop)
        self.step = self.saved = found.step
        for reason in found.passed_over:
            self.run.console.line(f"passed over a damaged checkpoint: {reason}")
        self.run.console.line(f"{self.stage.path.name}: going on from step {self.step}")

    def _check_metrics(self) -> None:
        """Refuses lines that no run wrote, on which the stage's summary would stumble at its end; says what is lost."""
        steps: set[float] = set()
        for number, line in enumerate(read_lines(self.stage.metrics), 1):
            strange = [n for n, value in line.items() if n not in NUMBERS or type(value) not in (int, float)]
            if strange or "step" not in line:
                raise RunError(
                    f"the log is damaged: {strange[0] if strange else 'a line without step'}",
                    where=f"{self.stage.metrics}:{number}",
                    remedy="remove that line, or the file",
                )
            steps.add(line["step"])
        if len(steps) < self.step:
            self.run.console.line(f"{self.stage.metrics} has lost {self.step - len(steps)} of its lines", "yellow")

    def _unfit(self, step: int, why: str) -> RunError:
        return RunError(
            f"the checkpoint of step {step} does not fit this stage: {why}",
            where=str(self.stage.checkpoints / f"step-{step}"),
            remedy="remove it to go on from the one before, or take another --name",
        )

    def log(self, values: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Writes one line of metrics for `step`, which has just ended. Every name must be in the registry."""
        if self.save_seconds:
            values = {**values, "seconds_save": self.save_seconds}
            self.save_seconds = 0.0
        if self.state["skipped"] > self._told_skips:
            values = {**values, "skipped_steps": self.state["skipped"] - self._told_skips}
            self._told_skips = self.state["skipped"]
        registry.check(set(values))
        plain = {name: float(value) for name, value in values.items()}
        self.metrics.append({"step": self.step, **plain})
        self._last = self.step, plain
        return plain

    def bad_step(self, error: StepError, batch: Sequence[Mapping[str, Any]]) -> None:
        """Writes the batch of a step that cannot be taken. Returns where the step may be left out; else raises the
        error: the recipe's bound is reached, or leaving it out would not help (a weight itself is damaged).

        batch: the rows, each with its number as `row` and its place as `source`.
        """
        damaged = damaged_weights(self.roles)
        if damaged:
            error.what += f"; the weight {damaged[0]} is not finite" + f", nor are {len(damaged) - 1} more" * (
                len(damaged) > 1
            )
        skipped, allowed = self.state["skipped"] + 1, self.run.recipe.skip_bad_steps
        skip = skipped <= allowed and not error.final and not damaged
        at_fault = set(error.rows)
        record = {"what": error.what, "where": error.where, "skipped": skip, "rows": sorted(at_fault)}
        file = self.stage.bad / f"step-{self.step + 1}-{skipped}.json"
        file.parent.mkdir(exist_ok=True)
        write_json(file, {**record, "batch": [{**row, "bad": row["row"] in at_fault} for row in batch]})
        self.events.append({"step": self.step + 1, "event": "bad_step", **record, "file": file.name})
        named = _places([row for row in batch if row["row"] in at_fault], error.where)
        shown = ", ".join(named[:SHOWN_ROWS]) + f" and {len(named) - SHOWN_ROWS} more" * (len(named) > SHOWN_ROWS)
        error.where = "; ".join(filter(None, (error.where, shown)))
        if skip:
            self.state["skipped"] = skipped
            self.run.console.line(f"left out, {skipped} of at most {allowed}: {error.what} ({error.where})", "yellow")
            return
        hint = "" if error.final or damaged else f"; --skip-bad-steps {skipped} leaves this step out"
        error.remedy = "; ".join(filter(None, (error.remedy, f"the batch is in {file}{hint}")))
        raise error

    def unscored(self, errors: Sequence[StepError]) -> None:
        """Notes and tells why responses of the step under way have no score and are left out."""
        told = [{"what": error.what, "where": error.where} for error in errors[:SHOWN_ROWS]]
        self.events.append({"step": self.step + 1, "event": "unscored", "count": len(errors), "errors": told})
        self.run.console.line(f"{len(errors)} without a score are left out; the first: {told[0]['what']}", "yellow")

    def end_step(self, last: bool) -> None:
        """Saves when it is time, and raises Interrupted after saving when the user asked to stop."""
        stop = self.run.interrupt.requested
        if last or stop or self.step % self.every == 0:
            self.save()
        if stop and not last:
            name = self.stage.path.name
            raise self.run.interrupted(f"stopped at step {self.step} of stage {name}; everything up to there is saved")

    def save(self) -> None:
        """Writes a checkpoint of this step, unless there is one."""
        if self.saved == self.step:
            return
        began = time.monotonic()
        tensors: dict[str, Tensor] = {f"weights/{n}": t for n, t in checkpoint_tensors(self.roles).items()}
        states: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            own, states[name] = flatten_optimizer(optimizer)
            tensors |= {f"{name}/{n}": t for n, t in own.items()}
        self._weigh()
        content, also = {"optimizers": states, "loop": self.state}, [self.state["best"]["step"]]
        checkpoint.save(self.stage.checkpoints, self.step, tensors, content, self.run.recipe.keep_checkpoints, also)
        self.save_seconds = time.monotonic() - began
        self.events.append({"step": self.step, "event": "checkpoint", "seconds": self.save_seconds})
        self.saved = self.step

    def _weigh(self) -> None:
        """Notes this step as the best so far where it is; a step whose metrics lack the number is not compared."""
        step, numbers = self._last
        if self.best is None or step != self.step or self.best not in numbers:
            return
        value, before = numbers[self.best], self.state["best"]
        sign = -1 if self.best.endswith("loss") else 1
        if before["metric"] != self.best or sign * value > sign * before["value"]:
            self.state["best"] = {"metric": self.best, "step": step, "value": value}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for log in (self.metrics, self.samples, self.events):
            log.close()


def _places(rows: Sequence[Mapping[str, Any]], told: str) -> list[str]:
    """Each place of these rows once, with the first row's number in the batch, without places that are told already."""
    first = {row["source"] or f"row {row['row']} of the batch": row["row"] for row in reversed(rows)}
    return [
        f"row {number} ({source})"
        for source, number in reversed(first.items())
        if not re.search(rf"(?<![\w./-]){re.escape(source)}(?!\w)", told)
    ]


def _part(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{name}/"): t for n, t in tensors.items() if n.startswith(f"{name}/")}


def _alike(default: Any, value: Any) -> bool:
    """Whether a value from a file is of the kind that the loop began with: the same keys, numbers where
    there were numbers."""
    if isinstance(default, dict):
        return (
            isinstance(value, dict)
            and (not default or default.keys() == value.keys())
            and all(_alike(item, value[name]) for name, item in default.items())
        )
    if isinstance(default, (list, tuple)):
        return isinstance(value, list) and len(value) == len(default) and all(map(_alike, default, value))
    if isinstance(default, (bool, str)):
        return isinstance(value, type(default))
    return isinstance(value, (int, float)) and not isinstance(value, bool)
