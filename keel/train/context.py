"""What every stage of a run is given, and the start and end that all training loops share: resume, log, checkpoint."""

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
from keel.runs.saver import Saver
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
        self.saved, self.save_seconds, self._waited = -1, 0.0, 0.0
        self.state |= {"skipped": 0, "best": {"metric": "", "step": -1, "value": 0.0}}
        self._saver, self._best_before = Saver(self.stage.checkpoints, self.run.recipe.keep_checkpoints), {}
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
        """Says what lines are lost; strange ones are refused, on which the stage's summary would stumble at its end."""
        steps = {line["step"] for line in read_metrics(self.stage.metrics)}
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
        """Saves when it is time, and raises Interrupted after saving when the user asked to stop.

        A save that fails is told and noted, training goes on, and the next save is the next attempt; only where the
        user asked to stop it is a RunError.
        """
        stop = self.run.interrupt.requested and not last
        self._settle(wait=False)
        if last or stop or self.step % self.every == 0:
            self._save(wait=last or stop)
        if not stop:
            return
        name = self.stage.path.name
        if self.saved != self.step:
            raise RunError(
                f"stopped at step {self.step} of stage {name}, which could not be saved",
                where=str(self.stage.checkpoints),
                remedy="make room or mend the rights; the same command goes on from "
                + (f"step {self.saved}" if self.saved >= 0 else "the start of the stage"),
            )
        raise self.run.interrupted(f"stopped at step {self.step} of stage {name}; everything up to there is saved")

    def _save(self, wait: bool) -> None:
        """Begins a checkpoint of this step; `_settle` notes its end. wait: until it is on disk."""
        began = time.monotonic()
        self._settle(wait=True)
        tensors: dict[str, Tensor] = {f"weights/{n}": t for n, t in checkpoint_tensors(self.roles).items()}
        states: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            own, states[name] = flatten_optimizer(optimizer)
            tensors |= {f"{name}/{n}": t for n, t in own.items()}
        self._best_before = self.state["best"]
        self._weigh()
        content, also = {"optimizers": states, "loop": self.state}, [self.state["best"]["step"]]
        self._saver.start(self.step, tensors, content, also, wait)
        self.save_seconds = self._waited = time.monotonic() - began
        if wait:
            self._settle(wait=True)

    def _settle(self, wait: bool) -> None:
        """Notes how the checkpoint that was under way ended, once it has. wait: until then."""
        done = self._saver.finish(wait)
        if done is None:
            return
        if done.error is None:
            self.saved = done.step
            times = {"seconds": done.seconds, "waited": self._waited}
            self.events.append({"step": done.step, "event": "checkpoint", **times})
            return
        # What was not saved is not the best that is kept.
        self.state["best"] = self._best_before
        self.run.console.line(f"{done.error}\ntraining goes on; the next checkpoint is the next attempt", "red")
        self.events.append({"step": done.step, "event": "checkpoint_failed", "what": str(done.error)})

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._saver.abandon()
        else:
            # A step that failed leaves the checkpoint before it whole; that the disk is full is then of less interest.
            with contextlib.suppress(*([RunError] if kind else [])):
                self._settle(wait=True)
        for log in (self.metrics, self.samples, self.events):
            log.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a metric log. Raises RunError with file:line for one that no run wrote."""
    lines = list(read_lines(path))
    for number, line in enumerate(lines, 1):
        strange = [n for n, value in line.items() if n not in NUMBERS or type(value) not in (int, float)]
        if strange or "step" not in line:
            raise RunError(
                f"the log is damaged: {strange[0] if strange else 'a line without step'}",
                where=f"{path}:{number}",
                remedy="remove that line, or the file",
            )
    return lines


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
