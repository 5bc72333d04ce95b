"""Writes encoding.json anew: python -m tests.golden.write_encoding. Read what changed before you keep it."""

import json
import tempfile
from pathlib import Path

from tests.golden.test_encoding import CASES, FAMILIES, GOLDEN, encoded

if __name__ == "__main__":
    made: dict[str, dict[str, object]] = {family: {} for family in FAMILIES}
    for family, kind in CASES:
        with tempfile.TemporaryDirectory() as folder:
            made[family][kind] = encoded(FAMILIES[family](), kind, Path(folder))
    lines = [
        f'"{family}": {{\n' + ",\n".join(f'  "{kind}": {json.dumps(value)}' for kind, value in kinds.items()) + "\n}"
        for family, kinds in made.items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
