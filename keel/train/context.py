"""What every stage of a run is given, and the start and end that all training loops share: resume, log, checkpoint."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from keel import metrics as registry
from keel.config import Recipe
from keel.errors import Interrupted
from keel.models.roles import Roles, checkpoint_tensors, restore_tensors
from keel.runs import checkpoint
from keel.runs.console import Console, Task
from keel.runs.folder import RunFolder, StageFolder
from keel.runs.interrupt import Interrupt
from keel.runs.log import JsonLines
from keel.runs.state import flatten_optimizer, restore_optimizer


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
        found = checkpoint.load_latest(self.stage.checkpoints)
        if found:
            self._restore(found)
        for log in (self.metrics, self.samples, self.events):
            log.cut(self.step)
        self.began = time.monotonic()

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
        registry.check(set(values))
        plain = {name: float(value) for name, value in values.items()}
        self.metrics.append({"step": self.step, **plain})
        return plain

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
