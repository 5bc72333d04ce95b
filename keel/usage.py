"""What `keel --help` and `keel COMMAND --help` print."""

HELP = """\
Keel post-trains language models from human preferences: SFT, reward model, PPO; or DPO and its relatives.

  keel run RECIPE.yaml        all stages of a recipe; done ones are skipped, a broken-off one goes on
  keel resume RUN             goes on with a run that broke off, as the same command would
  keel sft|reward|preference|ppo|eval RECIPE.yaml   one stage, on what the ones before it left
  keel show RECIPE.yaml       the resolved settings and the schedule; runs nothing
  keel plan RECIPE.yaml       peak memory and time per update before it runs, and what to change where it does not fit
  keel inspect FILE           what is in a data file; with --model, its rows as the trainer sees them
  keel chat RUN               talk to a run: before and after training side by side
  keel export RUN OUT         the model of a run's newest or best checkpoint as a plain folder
  keel classic CartPole-v1    the same PPO on a gymnasium task; --algorithm trpo|reinforce beside it

Any setting is a flag: keel run recipes/quickstart.yaml --ppo.policy.clip 0.1 --name my-run
Each command has its own help: keel plan --help. All settings with their meaning: keel run RECIPE.yaml --help
Of a flag that stands twice the last counts.
--overwrite replaces a stage that was made with other settings (refused without it).
"""
STAGES = {
    "sft": "Supervised fine-tuning, the first stage of a recipe.",
    "reward": "Trains the reward model of a recipe, on the model that `keel sft` left.",
    "preference": "DPO or one of its relatives, on the model that `keel sft` left.",
    "ppo": "Online training, on the models that `keel sft` and `keel reward` left.",
    "eval": "Compares before and after training, on the models that the other stages left.",
}
"""The commands that run one stage, each with what it does."""
_WHAT = {
    **STAGES,
    "run": "Runs all stages of a recipe. Done ones are skipped, a broken-off one goes on from its last checkpoint.",
    "show": "Prints every setting of a recipe, defaults filled in, and the schedule that follows. Runs nothing.",
    "plan": "Predicts peak memory and time per update, and says what to change where a recipe does not fit.",
    "resume": "Goes on with the run in a folder, by the settings that its manifest.json holds.",
    "inspect": "Shows what is in data files, folders or Hub ids, and what a run would drop or cut.",
    "chat": "Talks to a run: the model before training and the one after it answer side by side.",
    "export": "Writes the model of a run's newest or best checkpoint as a plain folder, also where a run broke off.",
    "classic": "PPO, TRPO or REINFORCE on a gymnasium task.",
}
_EXAMPLES = {
    "run": ["recipes/quickstart.yaml", "recipes/quickstart.yaml --ppo.policy.clip 0.1 --name clip-01"],
    "show": ["recipes/quickstart.yaml --ppo.updates 10"],
    "plan": ["recipes/smollm2-preferences.yaml --model.backbone separate"],
    "resume": ["runs/quickstart", "runs/mine --ppo.reward reward.py:score"],
    "inspect": [
        "pairs.jsonl --model runs/quickstart/sft/model",
        "a.csv --held-out b.csv --columns prompt query",
    ],
    "chat": ["runs/quickstart --temperature 0"],
    "export": ["runs/quickstart my-model --best"],
    "classic": ["CartPole-v1 --algorithm trpo --steps 200000 --seed 1"],
    "preference": ["recipes/dpo.yaml"],
}
_TAKES = {
    "resume": "RUN [--SETTING VALUE ...]",
    "inspect": "FILE ... [--FLAG VALUE ...]",
    "chat": "RUN [--FLAG VALUE ...]",
    "export": "RUN OUT [--best]",
    "classic": "ENVIRONMENT [--overwrite] [--FLAG VALUE ...]",
    **dict.fromkeys(("show", "plan"), "RECIPE.yaml [--SETTING VALUE ...]"),
}


def help_of(command: str) -> str:
    """A command's own help: how it is called, what it does, examples. The flags of inspect, chat, export and classic
    are not in it."""
    takes = _TAKES.get(command, "RECIPE.yaml [--overwrite] [--SETTING VALUE ...]")
    lines = [f"keel {command} {takes}", "", _WHAT[command]]
    if "--overwrite" in takes:
        lines.append("--overwrite replaces what was made with other settings (refused without it).")
    lines += ["", *(f"  keel {command} {line}" for line in _EXAMPLES.get(command, ["recipes/quickstart.yaml"])), ""]
    if "--SETTING" in takes:
        settings = "run RECIPE.yaml" if command == "resume" else f"{command} RECIPE.yaml"
        lines.append("Any setting is a flag by its full path, such as --ppo.policy.clip 0.1; null is `none`.")
        lines.append(f"All settings with their meaning: keel {settings} --help")
    return "\n".join(lines)
