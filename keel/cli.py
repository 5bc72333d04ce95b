"""The command `keel`. Nothing heavy is imported before a recipe has passed its checks."""

import atexit
import difflib
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("PYDANTIC_ERRORS_INCLUDE_URL", "0")  # before pydantic: its links help no user of Keel
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # two thread pools on one laptop slow each other down
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # one set of bars, ours

from keel.config import NonNegative, Recipe, Section, usable_cores
from keel.errors import ConfigError, KeelError, StopAtOnce
from keel.runs.console import Console
from keel.runs.folder import RunFolder
from keel.runs.resources import let_threads_wait
from keel.usage import HELP, STAGES, help_of


class ChatFlags(Section):
    """What `keel chat` takes beside the run."""

    temperature: NonNegative | None = None
    """Of sampling; 0 takes the likeliest token. Null: as in training."""


class ExportFlags(Section):
    """What `keel export` takes beside run and folder."""

    best: bool = False
    """The best checkpoint by the stage's keep_best, not the newest."""


def main(argv: list[str] | None = None) -> None:
    """Runs a command and exits: 0 well, 2 a mistake of the user's, 3 a number that is not finite, 130 stopped by
    Ctrl-C, 143 by SIGTERM."""
    try:
        code = _code(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt as error:
        Console(_stderr()).line("keel: stopped at once; the same command goes on from the last checkpoint", "red")
        code = 128 + (error.number if isinstance(error, StopAtOnce) else signal.SIGINT)
    # While Python takes itself down, one more Ctrl-C would put the signal in the place of this code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _code(arguments: list[str]) -> int:
    """Runs a command, tells the user's mistakes, and returns the exit code."""
    try:
        return _dispatch(arguments, Console())
    except KeelError as error:
        Console(_stderr()).line(f"keel: {error}", "red")
        return error.exit_code
    except BrokenPipeError:  # whoever read the output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _stderr():
    from rich.console import Console as RichConsole

    return RichConsole(stderr=True, highlight=False)


def _dispatch(arguments: list[str], console: Console) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        console.line(HELP)
        return 0
    command, rest = arguments[0], arguments[1:]
    if command == "--version":
        from importlib.metadata import version

        console.line(f"keel-rl {version('keel-rl')}")
        return 0
    commands: dict[str, Callable[[list[str], Console], None]] = {
        "run": lambda rest, console: _run(rest, console, None),
        "resume": _resume,
        "show": _show,
        "plan": _plan,
        "inspect": _inspect,
        "chat": _chat,
        "export": _export,
        "classic": _classic,
        **{stage: (lambda rest, console, stage=stage: _run(rest, console, stage)) for stage in STAGES},
    }
    if command not in commands:
        near = difflib.get_close_matches(command, commands, n=1)
        raise ConfigError(
            f"there is no command {command!r}", remedy=f"did you mean {near[0]}?" if near else "see keel --help"
        )
    if asked := {"-h", "--help"} & set(rest):
        _help(command, [argument for argument in rest if argument not in asked], console)
    else:
        commands[command](rest, console)
    return 0


def _help(command: str, rest: list[str], console: Console) -> None:
    """A command's own help; with a recipe, all of its settings as flags."""
    from keel import settings

    if rest and command in ("run", "show", "plan", *STAGES):
        console.line(f"The settings of {rest[0]} as flags of keel {command}:")
        lines = settings.help_lines(Recipe, _recipe(command, _without_overwrite(rest)).model_dump())
    else:
        console.line(help_of(command))
        lines = iter(())
        if command == "classic":
            from keel.classic.config import ClassicConfig

            lines = settings.help_lines(ClassicConfig, {"env": rest[0] if rest else "ENVIRONMENT"})
        elif command == "inspect":
            from keel.inspect.command import Flags

            lines = settings.help_lines(Flags, {})
        elif command in ("chat", "export"):
            lines = settings.help_lines(ChatFlags if command == "chat" else ExportFlags, {})
    for line in lines:
        console.line(line)


def _without_overwrite(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument != "--overwrite"]


def _recipe(command: str, arguments: list[str]) -> Recipe:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError(f"keel {command} needs a recipe", remedy=f"keel {command} recipes/quickstart.yaml")
    from keel import recipe

    return recipe.load(arguments[0], arguments[1:])


def _run(arguments: list[str], console: Console, stage: str | None) -> None:
    name = stage or "run"
    command = shlex.join(["keel", name, *arguments])
    overwrite = "--overwrite" in arguments
    recipe = _recipe(name, _without_overwrite(arguments))
    if stage and getattr(recipe, stage) is None:
        raise ConfigError(f"this recipe has no stage {stage}", where=arguments[0], remedy=f"add `{stage}:` to it")
    _start(recipe, console, command, stage, overwrite)


def _loading(console: Console, threads: int, what: str = "torch and transformers") -> None:
    console.line(f"loading {what} ...", "dim")
    if "torch" not in sys.modules and (idle := let_threads_wait(threads)) is not None:
        console.line(
            f"other processes leave {idle:.1f} cores to {threads} threads, which sleep where they wait for each other; "
            "alone on the machine Keel is faster",
            "yellow",
        )


def _start(recipe: Recipe, console: Console, command: str, stage: str | None = None, overwrite: bool = False) -> None:
    console.line(f"{recipe.name}: seed {recipe.seed}, {recipe.threads} threads, in {Path(recipe.root) / recipe.name}")
    _print_schedule(recipe, console)
    _check_places(recipe)
    with RunFolder.open(recipe.root, recipe.name) as folder:
        assert recipe.threads
        _loading(console, recipe.threads)
        from keel.train.pipeline import run_recipe

        run_recipe(recipe, folder, console, command, stage, overwrite)


def _check_places(recipe: Recipe) -> None:
    """Raises DataError or ConfigError where a file that the recipe names is not there, before anything heavy loads."""
    from keel.data.files import RowStream

    ppo = recipe.ppo
    for stage in (recipe.sft, recipe.reward, recipe.preference, ppo, ppo and ppo.ptx):
        if stage and stage.data:
            RowStream(stage.data.path, "prompt" if stage is ppo else None)
    place = ppo.reward.rpartition(":")[0] if ppo else ""
    if place.endswith(".py") and not Path(place).is_file():
        remedy = f"paths start from {Path.cwd()}; check the name"
        raise ConfigError(f"there is no file {place}", where="ppo.reward", remedy=remedy)


def _resume(arguments: list[str], console: Console) -> None:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("keel resume needs a run folder", remedy="keel resume runs/quickstart")
    from keel import recipe as recipes

    folder, flags = RunFolder(arguments[0]), arguments[1:]
    manifest = folder.manifest()
    recipe = recipes.recorded(manifest, folder.path)
    # The folder may be another's: what it names must not be called, or sent a token, without being asked for.
    asked = any(flag.partition("=")[0] == "--ppo.reward" for flag in flags)
    if recipe.ppo and recipe.ppo.reward != "model" and not asked:
        raise ConfigError(
            f"the run calls {recipe.ppo.reward} for its rewards, which a run folder alone must not make Keel do",
            where=str(folder.path / "manifest.json"),
            remedy=f"if you trust it: {shlex.join(['keel', 'resume', *arguments, '--ppo.reward', recipe.ppo.reward])}",
        )
    command = shlex.join(["keel", "resume", *arguments])
    _start(recipes.with_flags(recipe, flags, str(folder.path / "manifest.json")), console, command)


def _show(arguments: list[str], console: Console) -> None:
    from keel import recipe as recipes

    recipe = _recipe("show", arguments)
    console.line(recipes.to_yaml(recipe))
    _print_schedule(recipe, console)


def _plan(arguments: list[str], console: Console) -> None:
    recipe = _recipe("plan", arguments)
    assert recipe.threads
    _loading(console, recipe.threads)
    import keel.train.pipeline  # noqa: F401  # all that a run has in memory
    from keel.train import plan

    plan.show(recipe, plan.forecast(recipe, console), console)


def _inspect(arguments: list[str], console: Console) -> None:
    from keel.inspect.command import inspect

    inspect(arguments, console)


def _print_schedule(recipe: Recipe, console: Console) -> None:
    from keel.recipe import schedule

    for stage, sentence in schedule(recipe):
        console.line(f"  {stage:<10} {sentence}")


def _chat(arguments: list[str], console: Console) -> None:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("keel chat needs a run folder", remedy="keel chat runs/quickstart")
    from keel import settings

    flags = settings.change(ChatFlags, {}, arguments[1:], f"keel chat {arguments[0]}")
    _loading(console, usable_cores(), "torch and the two models")
    from keel.evaluate.chat import open_chat

    chat = open_chat(arguments[0], flags.temperature)
    console.line("one message a line; an empty line or Ctrl-D ends" + ". For example:" * bool(chat.examples), "dim")
    for example in chat.examples:
        console.line(f"  {example}", "dim")
    while True:
        try:
            text = console.rich.input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except (UnicodeDecodeError, TypeError):
            raise ConfigError("a line of the input is no text", remedy="give lines in UTF-8") from None
        if not text:
            return
        if not sys.stdin.isatty():
            console.line(f"> {text}", "dim")
        for name, answer in chat.answer(text).items():
            console.line(f"{name:<7} {answer}", "green" if name == "after" else "")


def _export(arguments: list[str], console: Console) -> None:
    if len(arguments) < 2 or any(argument.startswith("-") for argument in arguments[:2]):
        raise ConfigError("keel export needs a run folder and a new folder", remedy="keel export runs/mine my-model")
    from keel import settings

    folder, out, *rest = arguments
    flags = settings.change(ExportFlags, {}, rest, f"keel export {folder}")
    console.line("loading torch and transformers ...", "dim")
    from keel.train.export import export_checkpoint

    export_checkpoint(folder, out, flags.best, console, shlex.join(["keel", "export", *arguments]))


def _classic(arguments: list[str], console: Console) -> None:
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("keel classic needs a gymnasium environment", remedy="keel classic CartPole-v1")
    from keel import settings
    from keel.classic.config import ClassicConfig

    env, *flags = _without_overwrite(arguments)
    config = settings.change(ClassicConfig, {"env": env}, flags, f"keel classic {env}")
    command = shlex.join(["keel", "classic", *_without_overwrite(arguments)])
    with RunFolder.open(config.root, config.run_name) as folder:
        _loading(console, config.threads, "torch")
        from keel.classic.train import train_classic

        result = train_classic(config, folder, console, command, "--overwrite" in arguments)
    last = result.get("episode_return")
    episodes = min(result["episodes"], 100)
    told = f"mean return of the last {episodes} episodes {last:.1f}" if last is not None else "no episode has ended"
    console.line(
        f"{result['env']}, {result['algorithm']}, seed {result['seed']}: {told} after {result['steps']} steps; "
        f"{result['steps_per_second']:.0f} steps per second; in {Path(config.root) / config.run_name}",
        "green",
    )


if __name__ == "__main__":
    main()
