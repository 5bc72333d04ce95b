"""Recipes: YAML files checked against the config tree, changed by flags, and the schedule that follows from them.

No torch here: a recipe is shown or refused at once.
"""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from keel import settings
from keel.config import PreferenceConfig, Recipe, RewardConfig
from keel.errors import ConfigError
from keel.plain_yaml import Document


def load(path: str | Path, flags: Sequence[str] = ()) -> Recipe:
    """Reads a recipe, applies flags such as `--ppo.policy.clip 0.1`, and fills in what follows from other fields.

    Raises:
        ConfigError: the file is missing, no YAML, or it or a flag names an unknown setting (the nearest is named), a
            wrong value or a setting that would do nothing.
    """
    document = _read_yaml(Path(path))
    return with_flags(parse(document.value, str(path), document.line), flags, str(path))


def with_flags(recipe: Recipe, flags: Sequence[str], where: str) -> Recipe:
    """The recipe with flags applied, resolved. Raises ConfigError. where: what is changed, for errors."""
    return settings.change(Recipe, recipe.model_dump(), flags, where).resolved()


def recorded(manifest: Mapping[str, Any], folder: Path) -> Recipe:
    """The recipe that a run's manifest holds, with the folder's own place and name. Raises ConfigError where it holds
    none that can be used."""
    where = str(folder / "manifest.json")
    if "recipe" not in manifest:
        raise ConfigError(
            "this is no run of a recipe"
            + ", but of a classic task, which holds no checkpoints" * ("classic" in manifest),
            where=where,
            remedy="give the folder that `keel run` made",
        )
    place = folder if folder.name not in ("", "..") else folder.resolve()
    return parse(manifest["recipe"], where).model_copy(update={"root": str(place.parent), "name": place.name})


def parse(tree: Any, where: str = "", line: settings.Line = settings.no_line) -> Recipe:
    """Checks a tree of plain values. Raises ConfigError with every fault found, each with its key.

    line: of a path of keys in the file `where`.
    """
    if not isinstance(tree, dict):
        raise ConfigError(
            f"a recipe is a mapping of settings, this is {'nothing' if tree is None else type(tree).__name__}",
            where=where,
            remedy="give a file of lines such as `name: mine`; recipes/ has examples",
        )
    return settings.check(Recipe, tree, where, line=line)


def _read_yaml(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        known = sorted(str(p) for p in Path("recipes").glob("*.yaml"))
        near = difflib.get_close_matches(str(path), known, n=1)
        shown = f"recipes here: {', '.join(known)}" if known else "give the path of a .yaml file"
        hint = f"did you mean {near[0]}?" if near else shown
        raise ConfigError("there is no such recipe", where=str(path), remedy=hint) from None
    except (OSError, ValueError) as error:
        folder = "this is a folder; give a .yaml file in it"
        reason = error.strerror if isinstance(error, OSError) else f"it is no text in UTF-8 ({error})"
        raise ConfigError(
            f"the recipe cannot be read: {reason or error}",
            where=str(path),
            remedy=folder if path.is_dir() else "give the path of a .yaml file",
        ) from None
    try:
        return Document(text)
    except (yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the recipe is no YAML: {' '.join(str(error).split())}",
            where=str(path),
            remedy="mend that line; recipes/ has examples",
        ) from None


def to_yaml(recipe: Recipe) -> str:
    """The whole tree as YAML, in the order of the config."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def schedule(recipe: Recipe) -> list[tuple[str, str]]:
    """What will happen, as (stage, sentence): counts of prompts, rollouts, minibatches and optimizer steps."""
    rows: list[tuple[str, str]] = []
    world = recipe.sandbox
    if world:
        rows.append(("sandbox", f"{world.pretrain_steps} optimizer steps of {world.pretrain_batch} transcripts"))
    if recipe.sft:
        rows.append(
            (
                "sft",
                _passes(
                    recipe.sft.epochs,
                    recipe.sft.batch,
                    world.prompts if world else None,
                    recipe.sft.held_out,
                    recipe.sft.max_rows,
                ),
            )
        )
    if recipe.reward:
        rows += [("reward", sentence) for sentence in _pair_passes(recipe.reward)]
    if recipe.preference:
        rows += [("preference", sentence) for sentence in _pair_passes(recipe.preference)]
    if recipe.ppo:
        ppo = recipe.ppo
        steps = ppo.updates * ppo.epochs * ppo.minibatches
        warm_up = min(ppo.critic.warmup_cap, ppo.updates) if ppo.has_critic else 0
        rows.append(
            (
                "ppo",
                f"{ppo.updates} updates x {ppo.rollouts} rollouts ({ppo.rollouts // ppo.responses_per_prompt} "
                f"prompts x {ppo.responses_per_prompt}) = {ppo.updates * ppo.rollouts} rollouts",
            )
        )
        rows.append(
            (
                "ppo",
                f"each update: {ppo.epochs} epoch(s) x {ppo.minibatches} minibatches of about "
                f"{ppo.rollouts // ppo.minibatches} = {steps} optimizer steps in all"
                + (
                    f", the policy's first ones held back while the critic warms up (at most {warm_up} updates)"
                    if warm_up
                    else ""
                ),
            )
        )
    if recipe.eval:
        trained = ", one response before and one after" if recipe.ppo or recipe.preference else ", one response"
        rows.append(("eval", f"{recipe.eval.prompts} held-out prompts{trained}"))
        if recipe.eval.best_of:
            rows.append(("eval", f"the best of {recipe.eval.best_of} responses of the SFT model to each of them"))
    return rows


def _passes(epochs: int, batch: int, rows: int | None, held_out: int, most: int | None) -> str:
    if rows is None:
        which = f"at most {most}" if most else "all"
        return f"{epochs} pass(es) over {which} demonstrations, after {held_out} are held out, {batch} a step"
    used = min(max(0, rows - held_out), most or rows)
    steps = -(-used * epochs // batch)
    return (
        f"{epochs} pass(es) over up to {used} demonstrations ({held_out} held out), {batch} a step = {steps} "
        "optimizer steps"
    )


def _pair_passes(settings: RewardConfig | PreferenceConfig) -> list[str]:
    sentences = []
    if settings.prompts and settings.responses_per_prompt:
        k = settings.responses_per_prompt
        pairs = settings.prompts * k * (k - 1) // 2
        sentences.append(f"{settings.prompts} prompts x {k} replies ranked: up to {pairs} pairs")
    most = f"at most {settings.max_prompts} prompts" if settings.max_prompts else "all prompts"
    what = ("pairs", "prompts")
    if isinstance(settings, PreferenceConfig) and settings.loss == "kto":
        what = ("thumbs", "thumbs")
    return [
        *sentences,
        f"{settings.epochs} pass(es) over {most} with their {what[0]}, after {settings.held_out} {what[0]} are "
        f"held out, {settings.batch} {what[1]} a step",
    ]
