"""A survey as plain values, for `--json`, and on the terminal. No torch here."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from keel.inspect.survey import FINDINGS, Found, Survey, percentiles, prompt_of, replies_of
from keel.runs.console import Console

BINS = 40
"""Bars of a histogram of lengths."""

LONGEST = 1500
"""Characters of a text that the terminal shows; the page shows all."""

STYLES = {"template": "dim", "prompt": "cyan", "response": "green", "end": "bold black on green"}
MEANING = {
    "template": "template",
    "prompt": "the row's prompt",
    "response": "response, supervised",
    "end": "end token, supervised",
}
"""What the uses of a token are called."""

TEMPLATES = {"tokenizer": "the tokenizer's own", "keel-default": "keel-default, as it has none", "plain": "none"}
"""Names of templates, for people."""


def report(survey: Survey, limits: Mapping[str, Any], tokens: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, Any]:
    """Everything as values of JSON.

    Args:
        limits: model, template and limits that rows were encoded with; empty without a model.
        tokens: of `survey.records`, one by one: part -> its tokens; empty without a model.
    """
    rows = []
    for at, record in enumerate(survey.records):
        row: dict[str, Any] = {
            "source": prompt_of(record).source,
            "messages": list(prompt_of(record).messages),
            **replies_of(record),
            "columns": {name: str(value) for name, value in prompt_of(record).columns.items()},
        }
        if tokens:
            row["tokens"] = {
                name: [{"id": token.id, "text": token.text, "use": token.use} for token in part]
                for name, part in tokens[at].items()
            }
        rows.append(row)
    return {
        "files": survey.files,
        "kind": survey.kind.name,
        "stage": survey.kind.stage,
        "why": f"{near(survey.first, survey.files)} has {' + '.join(survey.shape)}" if survey.shape else "as asked",
        "also": survey.also,
        "rows": {"read": survey.read, "kept": survey.kept}
        | {name: sum(each.count for each in getattr(survey, name).values()) for name in ("dropped", "refused")},
        "dropped": _reasons(survey.dropped),
        "repaired": _reasons(survey.repaired),
        "refused": _reasons(survey.refused),
        "prompts": survey.prompts,
        "thumbs_up": survey.up if survey.kind.name == "thumb" else None,
        "encoded": dict(limits),
        "unit": survey.unit,
        "lengths": {name: percentiles(values) for name, values in survey.lengths.items()},
        "histograms": {name: _histogram(values) for name, values in survey.lengths.items()},
        "findings": _findings(survey),
        "shown": rows,
    }


def _reasons(reasons: Mapping[str, Found]) -> list[dict[str, Any]]:
    listed = [{"reason": name, "count": each.count, "places": each.places} for name, each in reasons.items()]
    return sorted(listed, key=lambda each: -each["count"])


def _findings(survey: Survey) -> list[dict[str, Any]]:
    found = []
    for name, meaning in FINDINGS.items():
        name = name.format(unit=survey.unit)
        if name in survey.found:
            each, (of, what) = survey.found[name], survey.among(name)
            found.append(
                {"name": name, "count": each.count, "of": of, "among": what, "meaning": meaning, "places": each.places}
            )
    return found


def _histogram(values: Sequence[int]) -> list[dict[str, int]]:
    """Rows by length, in bins of equal width, `first` to `last` both in them."""
    width = max(1, math.ceil((max(values) + 1) / BINS))
    bins = [0] * (max(values) // width + 1)
    for value in values:
        bins[value // width] += 1
    return [{"first": at * width, "last": (at + 1) * width - 1, "rows": rows} for at, rows in enumerate(bins)]


def headline(told: Mapping[str, Any]) -> str:
    """One sentence: how many rows of what kind, and what became of them."""
    rows = told["rows"]
    parts = [f"{rows['kept']} of {rows['read']} rows are kept"]
    parts += [f"{rows[name]} {name}" for name in ("dropped", "refused") if rows[name]]
    repaired = sum(each["count"] for each in told["repaired"])
    parts += [f"{repaired} repairs"] if repaired else []
    parts += [f"{told['prompts']} distinct prompts"]
    if told["thumbs_up"] is not None:
        parts.append(f"{told['thumbs_up']} thumbs up")
    return ", ".join(parts)


def share(finding: Mapping[str, Any]) -> str:
    """A finding's count and share, such as "12 of 300 rows (4.0 %)"."""
    among = finding["among"].replace("row", "rows").replace("response", "responses").replace("pair", "pairs")
    part = finding["count"] / max(1, finding["of"])
    return f"{finding['count']} of {finding['of']} {among} ({100 * part:.1f} %)"


def part_title(name: str, part: Sequence[Mapping[str, Any]]) -> str:
    """What a part of a row is called above its tokens."""
    cut = name != "prompt" and all(token["use"] != "end" for token in part)
    return f"{name}, {len(part)} tokens" + (", its end is cut" if cut else "")


def striking(finding: Mapping[str, Any]) -> bool:
    """Whether a person should look: a length that decides little is told, but no fault."""
    return finding["among"] != "pair of unequal length" or finding["count"] > 0.6 * finding["of"]


def places(each: Mapping[str, Any], files: Sequence[str]) -> str:
    """The first places, short where there is one file, and how many more."""
    named = [near(place, files) for place in each["places"]]
    more = each["count"] - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def near(place: str, files: Sequence[str]) -> str:
    """A place without its file where there is one file only: "line 12", "row 12"."""
    if len(files) != 1 or not place.startswith(f"{files[0]}:"):
        return place
    inside = place.removeprefix(f"{files[0]}:")
    return f"line {inside}" if inside[0].isdigit() else inside


def encoded_with(told: Mapping[str, Any]) -> str:
    """What rows were encoded with, or what to do to see that."""
    if not told["encoded"]:
        return "--model MODEL shows tokens, the template, and what is cut"
    has = told["encoded"]
    return (
        f"tokens of {has['model']}, template: {TEMPLATES[has['template']]}, "
        f"at most {has['max_prompt_tokens']} tokens a prompt and {has['max_response_tokens']} a response"
    )


def drift(told: Mapping[str, Any]) -> str:
    """What the template does to earlier turns, and what that means; empty where it leaves them alone."""
    found = told["encoded"].get("drift")
    if not found:
        return ""
    return (
        f"the template writes earlier turns of the assistant otherwise than they were trained ({found}). Nothing "
        "is learned wrongly: with sft.loss_on every, a turn after such a one begins a sequence of its own. A template "
        "that leaves earlier turns as they are, and ends each with the end token, makes one sequence of a conversation"
    )


def show(told: Mapping[str, Any], console: Console, *, ids: bool) -> None:
    """The report on the terminal. ids: every token with its id."""
    console.line(", ".join(told["files"]), "bold")
    console.line(f"{told['kind']}s, for {told['stage']}: {told['why']}")
    if told["also"]:
        console.line(f"they may be read as {' or '.join(told['also'])} too", "dim")
    console.line(headline(told))
    for name, style in (("refused", "red"), ("dropped", "yellow"), ("repaired", "")):
        for each in told[name]:
            console.line(f"  {name}: {each['count']} x {each['reason']}  ({places(each, told['files'])})", style)
    if told["refused"]:
        console.line("  a run stops at the first refused row", "red")
    console.line()
    for finding in told["findings"]:
        sign, style = ("!", "yellow") if striking(finding) else ("-", "")
        where = f": {places(finding, told['files'])}" if finding["places"] else ""
        console.line(f"{sign} {finding['name']}: {share(finding)}{where}", style)
        console.line(f"    {finding['meaning']}", "dim")
    if told["rows"]["kept"] and not any(map(striking, told["findings"])):
        console.line("nothing striking in the rows that are kept", "green")
    console.line()
    if told["lengths"]:
        columns = ["", *next(iter(told["lengths"].values()))]
        rows = [[name, *cuts.values()] for name, cuts in told["lengths"].items()]
        console.table(columns, rows, title=f"length in {told['unit']}s")
    console.line(encoded_with(told), "dim")
    if drift(told):
        console.line(drift(told), "dim")
    for row in told["shown"]:
        console.rule(near(row["source"], told["files"]))
        _show_row(row, console, ids)
    if any("tokens" in row for row in told["shown"]):
        console.line()
        legend = [(f"{_marked(MEANING[use], use, console)}", style) for use, style in STYLES.items()]
        console.parts([part for each in legend for part in (each, ("   ", ""))])


def _marked(text: str, use: str, console: Console) -> str:
    """Where there is no colour, what is supervised stands between marks."""
    return text if use in ("template", "prompt") or console.rich.color_system else f"«{text}»"


def _show_row(row: Mapping[str, Any], console: Console, ids: bool) -> None:
    replies = [name for name in ("response", "chosen", "rejected") if name in row]
    if "tokens" not in row:
        for message in row["messages"]:
            console.parts([(f"{message['role']}  ", "bold"), (_short(message["content"]), STYLES["prompt"])])
        for name in replies:
            console.parts([(f"{name}  ", "bold"), (_short(row[name]), STYLES["response"])])
    for name, part in row.get("tokens", {}).items():
        console.line(part_title(name, part), "bold")
        runs: list[tuple[str, str]] = []
        for token in part:
            text = f"{token['text']}⟨{token['id']}⟩" if ids else token["text"]
            if runs and runs[-1][1] == token["use"]:
                runs[-1] = (runs[-1][0] + text, token["use"])
            else:
                runs.append((text, token["use"]))
        console.parts([(_marked(_short(text), use, console), STYLES[use]) for text, use in runs])
    if row["columns"]:
        columns = ", ".join(f"{name}={_short(value, 60)!r}" for name, value in row["columns"].items())
        console.line(f"other columns: {columns}", "dim")


def _short(text: str, most: int = LONGEST) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} [... {len(text) - most} characters ...] {text[-(most // 2) :]}"
