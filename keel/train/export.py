"""A checkpoint's policy as a plain model folder: what its stage would have left, had it ended at that step."""

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from keel.config import Recipe
from keel.errors import RunError
from keel.evaluate.trained import model_before, policy_stages
from keel.models.loading import load_encoder, pick_device, quiet_transformers
from keel.models.roles import restore_tensors
from keel.recipe import recorded
from keel.runs import checkpoint
from keel.runs.checkpoint import Checkpoint
from keel.runs.console import Console
from keel.runs.folder import RunFolder, StageFolder
from keel.runs.interrupt import Interrupt
from keel.train.context import Run
from keel.train.stages import build_policy, save_tokenizer

POLICY = "weights/policy/"


def export_checkpoint(folder: str, out: str, best: bool, console: Console, command: str) -> None:
    """Writes the policy of the newest whole checkpoint, or of the best one that is kept, to the new folder `out`. The
    run's folder is only read, while a run works in it too.

    Raises RunError where there is no such checkpoint, what the stage began with has changed, or `out` cannot be made.
    """
    quiet_transformers()
    target = Path(out)
    if os.path.lexists(target):
        raise RunError("there is something already", where=out, remedy="name a folder that is not there yet")
    run = RunFolder(folder)
    manifest = run.manifest()
    recipe = recorded(manifest, run.path)
    stage, found = _newest(run, recipe)
    name = stage.path.name
    for reason in found.passed_over:
        console.line(f"passed over a damaged checkpoint: {reason}", "yellow")
    if best:
        found = _best(stage, found)
    start = model_before(run, manifest, recipe, name)
    encoder = load_encoder(start, recipe.model)
    lora = recipe.sft.tuning == "lora" if recipe.sft and name == "sft" else recipe.model.backbone == "shared"
    roles = build_policy(Run(recipe, run, console, Interrupt(), pick_device(recipe.model.device), command), start, lora)
    restore_tensors(roles, {n.removeprefix("weights/"): t for n, t in found.tensors.items() if n.startswith(POLICY)})
    aside = target.with_name(f".tmp-{target.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        roles.export("policy", aside)
        save_tokenizer(encoder, aside)
        os.rename(aside, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunError(
            f"the model cannot be written: {error}", where=out, remedy="make room or mend the rights"
        ) from error
    console.line(f"the policy of stage {name} after step {found.step} is in {out}", "green")


def _newest(run: RunFolder, recipe: Recipe) -> tuple[StageFolder, Checkpoint]:
    """The last stage that has one, and its newest."""
    for name in reversed(policy_stages(recipe, run)):
        stage = run.stage(name)
        if found := checkpoint.newest(stage.checkpoints):
            return stage, found
    raise RunError(
        "no stage of this run has a checkpoint yet", where=str(run.path), remedy="start it with keel run, or wait"
    )


def _best(stage: StageFolder, newest: Checkpoint) -> Checkpoint:
    loop = newest.state.get("loop")
    noted = loop.get("best") if isinstance(loop, dict) else None
    step = noted.get("step") if isinstance(noted, dict) else None
    if not isinstance(step, int) or step < 0:
        raise RunError(
            f"stage {stage.path.name} keeps no best checkpoint",
            where=str(stage.checkpoints),
            remedy="leave --best out for the newest; keep_best in the stage's section keeps the best of a run",
        )
    return newest if step == newest.step else checkpoint.load(stage.checkpoints, step)
