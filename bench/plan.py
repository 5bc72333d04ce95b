"""The peak memory that `keel plan` foretells beside the peak that `keel ppo` then has, each a process of its own.

    python -m bench.plan quickstart smollm2-lora

quickstart: recipes/quickstart.yaml, whose earlier stages are made first. smollm2-lora: four roles on one bfloat16 base;
smollm2-full: a float32 model for each. Both with a checkpoint on the way, which copies what it holds. The result is
the share by which the forecast is off.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from bench.common import HERE, REPOSITORY, Bounds, keel, line, progress, run, write
from bench.workload import model_folder, prepare, recipe
from keel.runs.console import Console

FORECAST = """
import json, sys
import keel.train.pipeline
from keel import recipe
from keel.runs.console import Console
from keel.train.plan import forecast
found = forecast(recipe.load(sys.argv[1]), Console())
print(json.dumps({"peak": found.peak, "seconds": found.seconds, "moments": found.moments}))
"""


def quickstart(root: Path) -> Path:
    """The shipped recipe, kept under `root`."""
    tree = yaml.safe_load((REPOSITORY / "recipes" / "quickstart.yaml").read_text(encoding="utf-8"))
    file = root / "quickstart.yaml"
    file.write_text(yaml.safe_dump({**tree, "root": str(root / "runs")}, sort_keys=False), encoding="utf-8")
    return file


def smollm2_lora(root: Path) -> Path:
    """Four roles on one base in bfloat16."""
    return _smollm2("smollm2-lora", {"dtype": "bfloat16", "backbone": "shared", "lora_rank": 16}, root)


def smollm2_full(root: Path) -> Path:
    """Four models in float32."""
    return _smollm2("smollm2-full", {"dtype": "float32", "backbone": "separate"}, root)


def _smollm2(name: str, model: dict[str, Any], root: Path) -> Path:
    ppo = {"rollouts": 16, "updates": 4, "checkpoint_every": 2}
    weights = model_folder(f"smollm2-{model['dtype']}", root)
    return recipe(f"plan-{name}", weights, root, os.cpu_count() or 1, model=model, ppo=ppo)


CASES = {"quickstart": quickstart, "smollm2-lora": smollm2_lora, "smollm2-full": smollm2_full}


def compare(name: str, root: Path, console: Console) -> Iterator[dict[str, Any]]:
    """Forecast and measured peak of one recipe."""
    console.line(f"{name}: Keel's stages before PPO")
    file = CASES[name](root)
    prepare(file, root)
    told = run([sys.executable, "-c", FORECAST, str(file)], root, HERE)
    found = json.loads(told.output.strip().splitlines()[-1])
    shutil.rmtree(root / "runs" / file.stem / "ppo", ignore_errors=True)
    finished = run(keel("ppo", str(file)), root, HERE)
    console.line(
        f"{name}: foretold {found['peak'] / 2**20:.0f} MiB in {told.seconds:.0f} s, measured "
        f"{finished.peak_bytes / 2**20:.0f} MiB"
    )
    detail = {"forecast_bytes": found["peak"], "measured_bytes": finished.peak_bytes, "plan_seconds": told.seconds}
    error = abs(found["peak"] / finished.peak_bytes - 1)
    yield line(f"plan/{name}", "share", error, None, Bounds("ours <=", 0.15, 0.05), detail | found)


def main() -> None:
    """Parses the command line and prints the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--root", type=Path, default=Path("runs/bench"), help="where models and runs are kept")
    arguments = parser.parse_args()
    unknown = set(arguments.cases) - CASES.keys()
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    root = arguments.root.resolve()
    root.mkdir(parents=True, exist_ok=True)
    for name in arguments.cases or CASES:
        for result in compare(name, root, progress()):
            write(result)


if __name__ == "__main__":
    main()
