"""The models of a run that answer: what its stages left, and what each of them began with, as they were left."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.config import Recipe
from keel.errors import RunError
from keel.models.loading import check_place, file_hash
from keel.runs.folder import RunFolder, StageFolder


def policy_stages(recipe: Recipe, run: RunFolder) -> list[str]:
    """The stages that train a model that answers, in order. Raises RunError where there is none."""
    stages = [name for name in ("sft", "preference", "ppo") if getattr(recipe, name)]
    if not stages:
        raise RunError(
            "this run trains no model that answers, only a reward model",
            where=str(run.path),
            remedy="give a run with one of the stages sft, preference and ppo",
        )
    return stages


def model_before(run: RunFolder, manifest: Mapping[str, Any], recipe: Recipe, trained: str) -> Path | str:
    """The model that a stage of these began with. Raises RunError where it is not there or has changed since."""
    if trained != "sft" and recipe.sft:
        return model_of(run.stage("sft"))
    if recipe.model.path in ("smollm2", "sandbox"):
        return model_of(run.stage("base"))
    _require_base(manifest, trained, recipe.model.path)
    return recipe.model.path


def model_of(stage: StageFolder) -> Path:
    """The model of a finished stage. Raises RunError where there is none, or not the one that it left."""
    result = stage.finished()
    if result is None:
        raise RunError(
            "this run has no trained model yet",
            where=f"{stage.path}, which is not finished",
            remedy="finish it with keel run first",
        )
    stage.require_model(result, file_hash(stage.model) if stage.model.is_dir() else None)
    return stage.model


def _require_base(manifest: Mapping[str, Any], trained: str, path: str) -> None:
    """Raises RunError where the model that the run began with has changed since."""
    check_place(path)
    inputs = manifest.get("inputs")
    parts = inputs.get(trained) if isinstance(inputs, dict) else None
    if isinstance(parts, dict) and parts.get("stage base") not in (None, file_hash(path)):
        raise RunError(
            "the model that the run began with is not as it was then", where=path, remedy="put it back, or run again"
        )
