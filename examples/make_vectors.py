"""Regenerate tests/vectors/ and the worked example of docs/format.md, byte for byte.

    python examples/make_vectors.py [--check]

With `--check`, it changes nothing and exits with 1 if a file would change.  The known answers of
third parties (nist_*.json, fernet_spec.json) are not generated here.
"""

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # so that `examples` can be imported

from examples.vectors.database import database_vectors
from examples.vectors.fixed import Json
from examples.vectors.keys import key_vectors
from examples.vectors.page import with_example
from examples.vectors.records import record_vectors

ROOT = Path(__file__).resolve().parent.parent
VECTORS = ROOT / "tests" / "vectors"
PAGE = ROOT / "docs" / "format.md"


def made_files() -> dict[Path, str]:
    """Return the text that each file should hold."""
    sql, contents = database_vectors()
    return {
        VECTORS / "records.json": _dumped(record_vectors()),
        VECTORS / "keys.json": _dumped(key_vectors()),
        VECTORS / "database.sql": sql,
        VECTORS / "database.json": _dumped(contents),
        PAGE: with_example(PAGE.read_text(encoding="utf-8")),
    }


def _dumped(value: Json) -> str:
    # Write each part of a context on one line.
    return re.sub(r"\{\s+(\"\w+\": .*)\s+\}", r"{\1}", json.dumps(value, indent=1)) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Regenerate the test vectors.")
    parser.add_argument("--check", action="store_true", help="change nothing, report differences")
    check: bool = parser.parse_args(arguments).check
    different = 0
    for path, text in made_files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        different += 1
        print(f"{path.relative_to(ROOT)} {'would change' if check else 'was written'}")
        if not check:
            path.write_text(text, encoding="utf-8", newline="\n")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
