"""Talking to a run: the model before PPO (or DPO and its relatives) and the one after it answer side by side."""

import itertools
from dataclasses import dataclass, field

from keel.evaluate.trained import model_before, model_of, policy_stages
from keel.models.loading import load_causal_lm, load_encoder, pick_device, quiet_transformers
from keel.models.separate import SeparateRoles
from keel.recipe import recorded
from keel.rollout.engine import Sampling
from keel.rollout.local import LocalEngine
from keel.runs.folder import RunFolder
from keel.runs.log import read_lines
from keel.types import Prompt

CHAT_STEP = 1 << 43
"""Sampling step of the first turn; apart from those of training and evaluation."""


@dataclass
class Chat:
    """Answers one message at a time; turns do not see each other.

    engines: by the name to show, in the order to show them.  examples: prompts to try.
    """

    engines: dict[str, LocalEngine]
    sampling: Sampling
    seed: int
    examples: list[str] = field(default_factory=list)
    turn: int = 0

    def answer(self, text: str) -> dict[str, str]:
        """Each model's reply, drawn with the same noise."""
        prompt = Prompt(({"role": "user", "content": text},), source="chat")
        self.turn += 1
        return {
            name: engine.generate([prompt], self.sampling, seed=self.seed, step=CHAT_STEP + self.turn).texts[0].strip()
            for name, engine in self.engines.items()
        }


def open_chat(folder: str, temperature: float | None = None) -> Chat:
    """Loads the models of a run. Raises RunError where the run has none yet."""
    quiet_transformers()
    run = RunFolder(folder)
    manifest = run.manifest()
    recipe = recorded(manifest, run.path)
    trained = policy_stages(recipe, run)[-1]
    before = model_before(run, manifest, recipe, trained)
    places = {"before": before, "after": model_of(run.stage(trained))}
    device = pick_device(recipe.model.device)
    engines: dict[str, LocalEngine] = {}
    for name, place in places.items():
        roles = SeparateRoles({"policy": load_causal_lm(place, recipe.model.dtype, device)}, {}, [])
        engines[name] = LocalEngine(roles, load_encoder(place, recipe.model))
    trained_at = recipe.ppo.temperature if recipe.ppo else 1.0
    sampling = Sampling(trained_at if temperature is None else temperature, recipe.model.max_response_tokens)
    return Chat(engines, sampling, recipe.seed, _examples(run))


def _examples(run: RunFolder, count: int = 3) -> list[str]:
    """Prompts of the evaluation, or of training where there was none."""
    files = [run.stage(name).samples for name in ("eval", "ppo")]
    rows = (row for file in files if file.exists() for row in read_lines(file))
    texts = (row["prompt"] for row in rows if isinstance(row.get("prompt"), str))
    prompts = dict.fromkeys(text for text in texts if "\n" not in text)  # one that can be typed
    return list(itertools.islice(prompts, count))
