"""A whole run: stages in order, each skipped when finished with the same inputs, resumed when half done."""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from keel import metrics as registry
from keel.config import Recipe, is_remote
from keel.errors import RunError
from keel.models.loading import check_place, file_hash, pick_device, quiet_transformers, smollm2_source, unpack_smollm2
from keel.rewards.functions import FunctionReward, source_hash
from keel.rewards.named import reward_named
from keel.runs.console import Console
from keel.runs.folder import RunFolder, StageFolder
from keel.runs.interrupt import Interrupt
from keel.train import stages, world
from keel.train.assess import eval_stage
from keel.train.context import Run
from keel.train.inputs import Inputs, read_inputs
from keel.train.preference import preference_stage
from keel.train.summary import draw, summarise

STAGES = ("base", "sft", "reward", "preference", "ppo", "eval")
UNIMPORTANT = {
    "checkpoint_every",
    "keep_best",
    "shown",
    "timeout",
    "max_failed",
    "retries",
    "rows_per_request",
    "token_env",
    "rest_frozen",
}
"""Settings that change no result: a stage made with another value is the same stage."""


def run_recipe(
    recipe: Recipe,
    folder: RunFolder,
    console: Console,
    command: str,
    only: str | None = None,
    overwrite: bool = False,
) -> None:
    """Runs the recipe's stages (or one of them, on what is there) in a folder that is open.

    Raises:
        KeelError: with what is wrong, where and the remedy; what was there stays there.
    """
    quiet_transformers()
    torch.set_num_threads(recipe.threads or 1)
    with Interrupt(
        lambda: console.line("finishing this step and saving; once more to stop at once", "yellow")
    ) as interrupt:
        run = Run(recipe, folder, console, interrupt, pick_device(recipe.model.device), command)
        Pipeline(run, only, overwrite).go()


class Pipeline:
    """Stages of one run. Fingerprints chain: each holds those of the stages that it builds on."""

    def __init__(self, run: Run, only: str | None, overwrite: bool):
        self.run, self.recipe, self.only, self.overwrite = run, run.recipe, only, overwrite
        self.fingerprints: dict[str, str] = {}
        self.inputs: dict[str, dict[str, Any]] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.counts: dict[str, Any] = {}
        self.worked = False

    def go(self) -> None:
        """All stages of the recipe, or the one that was asked for; then the summary, when there is an evaluation."""
        recipe = self.recipe
        if recipe.model.path not in ("sandbox", "smollm2"):
            check_place(recipe.model.path)
        # A mistake in it should show before an hour of SFT.
        source = reward_named(recipe.ppo) if recipe.ppo and recipe.ppo.reward != "model" else None
        data = self.run.folder.stage("base").path
        base = self._base() if recipe.sandbox else None
        rows = read_inputs(recipe, data, self.run.console, self.run.folder.path)
        if isinstance(source, FunctionReward):
            source.check_columns(itertools.chain(rows.train_prompts, rows.heldout_prompts))
        self.counts = rows.counts()
        start = base = base or self._base()
        if rows.demonstrations:
            read = rows.demonstrations
            start = self._stage("sft", {"data": read.sha256}, lambda s: stages.sft_stage(self.run, s, base, read, data))
        reward_folder = None
        if recipe.reward and self._reaches("reward"):
            reward_folder = self._stage(
                "reward",
                {"data": rows.pairs.sha256 if rows.pairs else "sandbox"},
                lambda s: stages.reward_stage(self.run, s, start, rows.pairs, data),
            )
        policy = self._preference(start, rows, data) if recipe.preference and self._reaches("preference") else None
        if rows.prompts and recipe.ppo and self._reaches("ppo"):
            inputs: dict[str, Any] = {"data": rows.prompts.sha256}
            if recipe.ppo.data:  # what is held out of the file is not trained on
                inputs["held_out"] = len(rows.heldout_prompts)
            if recipe.ppo.reward != "model" and not is_remote(recipe.ppo.reward):
                inputs["reward_function"] = source_hash(recipe.ppo.reward)
            if rows.ptx:
                inputs["ptx_data"] = rows.ptx.sha256
            policy = self._stage("ppo", inputs, lambda s: stages.ppo_stage(self.run, s, start, reward_folder, rows))
            draw(self.run, self.results.get("base", {}).get("gold_best"))
        if recipe.eval and self._reaches("eval"):
            held_out = rows.heldout_prompts
            self._stage("eval", {}, lambda s: eval_stage(self.run, s, start, policy, reward_folder, held_out))
            summarise(self.run, self.results, self.worked)
        elif self.worked and self.results:
            last = self.run.folder.stage(list(self.results)[-1])
            self.run.console.line(f"the stage {last.path.name} left its model in {last.model}", "green")
        self._manifest()
        if not self.worked:
            self.run.console.line(f"{recipe.name} is finished; nothing was left to do", "green")

    def _preference(self, start: Path | str, rows: Inputs, data: Path) -> Path:
        read = rows.preferences
        ranked = self.run.folder.stage("reward").path / world.PREFERENCES if self.recipe.reward else None
        return self._stage(
            "preference",
            {"data": read.sha256 if read else "sandbox"},
            lambda s: preference_stage(self.run, s, start, read, data, ranked),
        )

    def _reaches(self, name: str) -> bool:
        return self.only is None or STAGES.index(name) <= STAGES.index(self.only)

    def _base(self) -> Path | str:
        recipe = self.recipe
        if recipe.sandbox:
            return self._stage("base", {}, lambda s: world.build_base(self.run, s))
        if recipe.model.path == "smollm2":
            source = smollm2_source()

            def unpack(stage: StageFolder) -> dict[str, Any]:
                self.run.console.line("unpacking SmolLM2-135M-Instruct")
                unpack_smollm2(stage.model, recipe.model.dtype)
                return {}

            return self._stage("base", {"source": hashlib.sha256(source.read_bytes()).hexdigest()}, unpack)
        self.fingerprints["base"] = file_hash(recipe.model.path)
        return recipe.model.path

    def _stage(self, name: str, inputs: Mapping[str, Any], work: Callable[[StageFolder], dict[str, Any]]) -> Path:
        parts: dict[str, Any] = {
            **self._settings(name),
            **inputs,
            **{f"stage {n}": f for n, f in self.fingerprints.items()},
        }
        fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        self.fingerprints[name], self.inputs[name] = fingerprint, parts
        stage, console = self.run.folder.stage(name), self.run.console
        if (
            self.only not in (None, name)
            and name != "base"
            and (not stage.path.exists() or stage.finished(fingerprint) is None)
        ):
            raise RunError(
                f"the stage {self.only!r} needs the stage {name!r}, which is not finished with these settings",
                where=str(stage.path),
                remedy="run the whole recipe with `keel run`, or that stage first",
            )
        state = stage.check(fingerprint, parts, self.overwrite and self.only in (None, name))
        result = stage.finished(fingerprint) if state == "finished" else None
        if result is None:
            self.run.stop_if_asked(f"before stage {name}")
            self.worked = True
            console.rule(name)
            self._manifest()
            began = time.monotonic()
            try:
                result = work(stage)
            except (OSError, SafetensorError) as error:
                raise RunError(
                    f"the stage could not write or read its files: {error}",
                    where=str(stage.path),
                    remedy="make room or mend the rights; the same command goes on from the last checkpoint",
                ) from error
            result["seconds"] = time.monotonic() - began
            result["model"] = _hash_of(stage)
            stage.finish(fingerprint, parts, result)
            if cut := {what: count for what, count in result.get("cut", {}).items() if count}:
                told = ", ".join(f"{count} {what}" for what, count in cut.items())
                limits = self.recipe.model.max_prompt_tokens, self.recipe.model.max_response_tokens
                console.line(f"{told} (limits: prompt {limits[0]}, response {limits[1]} tokens)", "yellow")
        else:
            stage.require_model(result, _hash_of(stage))
            console.line(f"{name}: already done, inputs unchanged", "dim")
        self.results[name] = result
        return stage.model

    def _settings(self, name: str) -> dict[str, Any]:
        tree = self.recipe.model_dump(mode="json")
        section = {"base": "sandbox"}.get(name, name)
        chosen = {
            "seed": tree["seed"],
            "model": {k: v for k, v in tree["model"].items() if k != "device"},
            section: tree[section],
        }
        return {key: value for key, value in flat(chosen).items() if key.rpartition(".")[2] not in UNIMPORTANT}

    def _manifest(self) -> None:
        self.run.folder.write_manifest(
            {
                "recipe": self.recipe.model_dump(mode="json"),
                "inputs": self.inputs,
                "data": self.counts,
                "cut": {name: result["cut"] for name, result in self.results.items() if "cut" in result},
                "command": self.run.command,
                "metrics": {
                    m.name: {"unit": m.unit, "meaning": m.meaning, "healthy": m.healthy}
                    for m in registry.REGISTRY.values()
                },
            }
        )


def _hash_of(stage: StageFolder) -> str | None:
    return file_hash(stage.model) if stage.model.is_dir() else None  # eval leaves none


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
