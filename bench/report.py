"""Runs the measurements that fit a CPU machine, and makes bench/results.json, the table and the picture of them.

    python -m bench.report run [NAME ...]      measures (all, or those named below), then writes the report
    python -m bench.report write               the report alone, from bench/results.json

A measurement replaces the results of the same names; the others stay. The peers' flags are environment variables here:
TRL_SCRIPT, TRL_PYTHON and TRL_DIR (bench/ppo.py).
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import HERE, REPOSITORY, met

MEASUREMENTS = {
    "sampler": ["bench.sampler"],
    "ppo-tiny": ["bench.ppo", "tiny"],
    "ppo-smollm2-lora": ["bench.ppo", "smollm2-lora"],
    "ppo-smollm2-full": ["bench.ppo", "smollm2-full"],
    "utilisation": ["bench.learner", "utilisation"],
    "scaling": ["bench.learner", "scaling"],
    "plan": ["bench.plan"],
    "data": ["bench.data"],
    "data-sft": ["bench.data", "sft"],
    "data-dpo": ["bench.data", "dpo"],
}
RESULTS = REPOSITORY / "bench" / "results.json"
PAGE = REPOSITORY / "docs" / "performance.md"
PICTURE = PAGE.with_suffix(".svg")
BEGIN, END = "<!-- begin: make bench -->", "<!-- end: make bench -->"


def measure(names: Sequence[str]) -> None:
    """Runs the measurements in turn; each result is kept at once, so that an interrupted report loses one at most."""
    for name in names:
        command = [sys.executable, "-m", *MEASUREMENTS[name]]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env={**os.environ, **HERE}, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        for text in process.stdout:
            keep(json.loads(text))
        if process.wait():
            raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")


def keep(result: Mapping[str, Any]) -> None:
    """Puts one result into bench/results.json, in the place of the one of its name."""
    known = {old["name"]: old for old in read()}
    known[result["name"]] = dict(result)
    text = json.dumps([known[name] for name in sorted(known)], indent=1, ensure_ascii=False)
    RESULTS.write_text(text + "\n", encoding="utf-8")


def read() -> list[dict[str, Any]]:
    """All results so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one row a result, then where it was measured."""
    rows = [
        "| what | unit | Keel | peer | ratio | at least | goal | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        sign = "≤ " if (result["judged"] or "").endswith("<=") else ""
        cells = [
            f"`{result['name']}`",
            result["unit"],
            *(_number(result[key]) for key in ("ours", "peer", "ratio")),
            *(sign + _number(result[key]) if result[key] is not None else "" for key in ("at_least", "goal")),
            _verdict(result),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    places = sorted({f"{r['machine']}; {', '.join(f'{k} {v}' for k, v in r['versions'].items())}" for r in results})
    return "\n".join([*rows, "", *(f"Measured on: {place}." for place in places)])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _verdict(result: Mapping[str, Any]) -> str:
    least, goal = met(result, "at_least"), met(result, "goal")
    if least is None:
        return ""
    return "goal met" if goal else "met" if least else "missed"


def draw(results: Sequence[Mapping[str, Any]], file: Path) -> None:
    """A bar for each ratio to a peer, with marks at the bounds, as an SVG whose bytes depend on the results alone."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "keel"
    shown = [result for result in results if result["ratio"] is not None][::-1]
    figure = Figure(figsize=(7.5, 0.45 * len(shown) + 1.0), layout="constrained")
    axis = figure.subplots()
    axis.barh([r["name"] for r in shown], [r["ratio"] for r in shown], color="tab:blue", height=0.6)
    for place, result in enumerate(shown):
        for bound, style in (("at_least", "-"), ("goal", ":")):
            if result[bound] is not None and result["judged"].startswith("ratio"):
                axis.plot([result[bound]] * 2, [place - 0.4, place + 0.4], style, color="black", linewidth=1.5)
    axis.axvline(1.0, color="tab:gray", linewidth=0.8)
    axis.set_xlabel("Keel / peer (line: at least, or at most for memory; dots: goal)")
    figure.savefig(file, format="svg", metadata={"Date": None})


def report() -> None:
    """Writes the table into docs/performance.md between its marks, and the picture beside it."""
    results = read()
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    parts = [table(results)] if results else ["Nothing has been measured yet."]
    if any(result["ratio"] is not None for result in results):
        draw(results, PICTURE)
        parts.append(f"![ratios to the peers]({PICTURE.name})")
    PAGE.write_text(f"{head}{BEGIN}\n{chr(10).join(parts)}\n{END}{tail}", encoding="utf-8")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "write"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    arguments = parser.parse_args()
    unknown = set(arguments.names) - MEASUREMENTS.keys()
    if unknown:
        parser.error(f"no measurement {', '.join(sorted(unknown))}; there are {', '.join(MEASUREMENTS)}")
    if arguments.what == "run":
        measure(arguments.names or list(MEASUREMENTS))
    report()


if __name__ == "__main__":
    main()
