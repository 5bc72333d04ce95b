"""The command `keel inspect`: its flags, and what follows from them. Torch is loaded only with --model."""

import itertools
import json
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from keel import settings
from keel.config import Positive
from keel.errors import ConfigError, DataError
from keel.inspect import page, report, survey
from keel.runs.console import Console

LARGE = 20_000_000
"""Bytes from which a bar shows how far the reading has come."""


@dataclass(config=ConfigDict(use_attribute_docstrings=True, extra="forbid"))
class Flags:
    """What `keel inspect` takes beside its files."""

    model: str | None = None
    """A model folder or Hub id: lengths in tokens, what is cut, and rows token by token."""
    kind: Literal["demonstrations", "preferences", "thumbs", "prompts"] | None = None
    """Read the rows as this. None: what the first row with known fields is."""
    columns: dict[str, str] = field(default_factory=dict)
    """Other people's column names: Keel's name, then the file's name, such as --columns prompt query."""
    held_out: tuple[str, ...] = ()
    """Files whose prompts should not be among these."""
    rows: Annotated[int, Field(ge=0)] = 2
    """Rows to show."""
    ids: bool = False
    """Show each token with its id (with --model)."""
    template: Literal["chat", "plain"] = "chat"
    """As model.template of a recipe (with --model)."""
    loss_on: Literal["last", "every"] = "last"
    """As sft.loss_on of a recipe (with --model)."""
    max_prompt_tokens: Positive = 512
    """As model.max_prompt_tokens of a recipe (with --model)."""
    max_response_tokens: Positive = 128
    """As model.max_response_tokens of a recipe (with --model)."""
    json: bool = False
    """Print the report as JSON instead."""
    html: str | None = None
    """Write the report as a page to this file too."""


def inspect(arguments: list[str], console: Console) -> None:
    """Runs the command. Raises KeelError where a file, a flag or the model cannot be used, after the report where
    no row can."""
    files = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if not files:
        raise ConfigError("keel inspect needs a file", remedy="keel inspect data.jsonl --model MODEL")
    flags = settings.change(Flags, {}, arguments[len(files) :], "keel inspect")
    _check(flags, files)
    measure, limits, encoder = survey.words, {}, None
    if flags.model is not None:
        if not flags.json:
            console.line("loading the tokenizer ...", "dim")
        encoder, limits = _encoder(flags, flags.model)
        from keel.inspect.tokens import Lengths

        measure = Lengths(encoder)
    taken = _take(flags, files, console, measure, "token" if encoder else "word")
    tokens: list[Any] = []
    if encoder:
        from keel.inspect.tokens import row_tokens

        tokens = [row_tokens(encoder, record, every_turn=flags.loss_on == "every") for record in taken.records]
    told = report.report(taken, limits, tokens)
    if flags.html is not None:
        _write(flags.html, page.page(told))
    if flags.json:
        console.rich.out(json.dumps(told, indent=1), highlight=False)
    else:
        report.show(told, console, ids=flags.ids)
        if flags.html is not None:
            console.line(f"written to {flags.html}", "green")
    if not taken.kept:
        raise DataError(
            f"no row of {taken.read} can be used",
            where=", ".join(taken.files),
            remedy="the report has the reasons; with --kind and --columns the rows are read otherwise",
        )


def _check(flags: Flags, files: list[str]) -> None:
    without = {
        "ids": False,
        "template": "chat",
        "loss_on": "last",
        "max_prompt_tokens": 512,
        "max_response_tokens": 128,
    }
    for name, default in without.items():
        if flags.model is None and getattr(flags, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                "it does nothing without --model", where=flag, remedy="give --model MODEL, or leave it out"
            )
    if flags.ids and flags.json:
        raise ConfigError("--json has the ids in any case", where="--ids", remedy="leave it out")
    for file in files:
        if file.endswith((".yaml", ".yml")):
            raise ConfigError("this is a recipe, no data", where=file, remedy="give the files that it names as `path`")


def _encoder(flags: Flags, model: str) -> tuple[Any, dict[str, Any]]:
    if model in ("smollm2", "sandbox"):
        remedy = "give the folder that a run of it has made, runs/NAME/base/model"
        raise ConfigError(f"{model} is made by a run and no folder", where="--model", remedy=remedy)
    limits = {name: getattr(flags, name) for name in ("max_prompt_tokens", "max_response_tokens")}
    from keel.config import ModelConfig
    from keel.models.loading import load_encoder

    encoder = load_encoder(model, ModelConfig(path=model, template=flags.template, **limits))
    told = {"model": model, "template": encoder.template_name, **limits, "eos_ids": list(encoder.eos_ids)}
    return encoder, told | {"drift": encoder.drift()}


def _take(flags: Flags, files: list[str], console: Console, measure: survey.Measure, unit: str) -> survey.Survey:
    def take(progress: Any) -> survey.Survey:
        return survey.take(
            files,
            kind=flags.kind,
            columns=flags.columns,
            held_out=list(flags.held_out) or None,
            measure=measure,
            unit=unit,
            shown=flags.rows,
            progress=progress,
        )

    size = sum(Path(file).stat().st_size for file in files if Path(file).is_file())
    if size < LARGE or flags.json:
        return take(lambda done: None)
    with console.task("reading", total=size // 1_000_000, unit="MB") as task:
        return take(lambda done: task.update(min(done // 1_000_000, task.total)))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written: {error.strerror or error}", where=path, remedy="give another place"
        ) from None
