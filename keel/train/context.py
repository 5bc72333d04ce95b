"""What every stage of a run is given, and the start and end that all training loops share: resume, log, checkpoint."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from keel import metrics as registry
from keel.config import Recipe
from keel.errors import Interrupted, StepError
from keel.models.roles import Roles, checkpoint_tensors, restore_tensors
from keel.runs import checkpoint
from keel.runs.console import Console, Task
from keel.runs.files import write_json
from keel.runs.folder import RunFolder, StageFolder
from keel.runs.interrupt import Interrupt
from keel.runs.log import JsonLines
from keel.runs.state import flatten_optimizer, restore_optimizer
from keel.train.numbers import damaged_weights

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
        return Interrupted(
            what, where=str(self.folder.path), remedy=f"the same command goes on from there: {self.command}"
        )

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
    """

    run: Run
    stage: StageFolder
    roles: Roles
    optimizers: Mapping[str, Optimizer]
    every: int
    state: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        self.metrics, self.samples, self.events = (
            JsonLines(p) for p in (self.stage.metrics, self.stage.samples, self.stage.events)
        )
        self.saved, self.save_seconds = -1, 0.0
        self.state.setdefault("skipped", 0)
        found = checkpoint.load_latest(self.stage.checkpoints)
        if found:
            self._restore(found)
        for log in (self.metrics, self.samples, self.events):
            log.cut(self.step)
        self.began, self._told_skips = time.monotonic(), self.state["skipped"]

    def _restore(self, found: checkpoint.Checkpoint) -> None:
        restore_tensors(
            self.roles, {n.removeprefix("weights/"): t for n, t in found.tensors.items() if n.startswith("weights/")}
        )
        for name, optimizer in self.optimizers.items():
            part = f"{name}/"
            own = {n.removeprefix(part): t for n, t in found.tensors.items() if n.startswith(part)}
            restore_optimizer(optimizer, own, found.state["optimizers"][name])
        self.state.update(found.state["loop"])
        self.step = self.saved = found.step
        for reason in found.passed_over:
            self.run.console.line(f"passed over a damaged checkpoint: {reason}")
        self.run.console.line(f"{self.stage.path.name}: going on from step {self.step}")

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
        named = [f"row {row['row']} ({row['source'] or 'no source'})" for row in batch if row["row"] in at_fault]
        shown = ", ".join(named[:SHOWN_ROWS]) + f" and {len(named) - SHOWN_ROWS} more" * (len(named) > SHOWN_ROWS)
        error.where = "; ".join(filter(None, (error.where, shown)))
        if skip:
            self.state["skipped"] = skipped
            self.run.console.line(f"left out, {skipped} of at most {allowed}: {error.what} ({error.where})", "yellow")
            return
        hint = "" if error.final or damaged else f"; --skip-bad-steps {skipped} leaves this step out"
        error.remedy = "; ".join(filter(None, (f"the batch is in {file}{hint}", error.remedy)))
        raise error

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
        checkpoint.save(self.stage.checkpoints, self.step, tensors, {"optimizers": states, "loop": self.state})
        self.save_seconds = time.monotonic() - began
        self.events.append({"step": self.step, "event": "checkpoint", "seconds": self.save_seconds})
        self.saved = self.step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for log in (self.metrics, self.samples, self.events):
            log.close()
