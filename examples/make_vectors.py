"""Regenerate tests/vectors/ and the worked example of docs/format.md, byte for byte.

    python examples/make_vectors.py [--check | --freeze]

With `--check`, it changes nothing and exits with 1 if a file would change.  The known answers of
third parties (nist_*.json, fernet_spec.json) are not generated here.  `--freeze` writes the
database file of the present format, tests/vectors/format2/, which no other run changes: see the
README there.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # so that `examples` can be imported

from examples.vectors.audit import audit_vectors
from examples.vectors.blobs import blob_vectors
from examples.vectors.collections import collection_vectors
from examples.vectors.database import database_file, database_vectors
from examples.vectors.fixed import Json
from examples.vectors.integrations import integration_vectors
from examples.vectors.keys import key_vectors
from examples.vectors.page import with_example
from examples.vectors.records import record_vectors
from examples.vectors.rejections import rejection_vectors
from examples.vectors.state_index import state_index_vectors

ROOT = Path(__file__).resolve().parent.parent
VECTORS = ROOT / "tests" / "vectors"
PAGE = ROOT / "docs" / "format.md"
FROZEN = VECTORS / "format2"


def made_files() -> dict[Path, str]:
    """Return the text that each file should hold."""
    sql, contents = database_vectors()
    with_collections, collections, rejected_collections = collection_vectors()
    with_memory, integrations, rejected_integrations = integration_vectors()
    with_index, searches = state_index_vectors()
    return {
        VECTORS / "records.json": _dumped(record_vectors()),
        VECTORS / "keys.json": _dumped(key_vectors()),
        VECTORS / "audit.json": _dumped(audit_vectors()),
        VECTORS / "blobs.json": _dumped(blob_vectors()),
        VECTORS / "database.sql": sql,
        VECTORS / "database.json": _dumped(contents),
        VECTORS / "rejections.json": _dumped(rejection_vectors(sql)),
        VECTORS / "collections.sql": with_collections,
        VECTORS / "collections.json": _dumped(collections),
        VECTORS / "collection_rejections.json": _dumped(rejected_collections),
        VECTORS / "integrations.sql": with_memory,
        VECTORS / "integrations.json": _dumped(integrations),
        VECTORS / "integration_rejections.json": _dumped(rejected_integrations),
        VECTORS / "state_index.sql": with_index,
        VECTORS / "state_index.json": _dumped(searches),
        PAGE: with_example(PAGE.read_text(encoding="utf-8")),
    }


def freeze() -> None:
    """Write tests/vectors/format2/, and print the hash that its test must have."""
    database, sql, contents = database_file()
    FROZEN.mkdir(exist_ok=True)
    (FROZEN / "sessions.db").write_bytes(database)
    (FROZEN / "sessions.sql").write_text(sql, encoding="utf-8", newline="\n")
    (FROZEN / "contents.json").write_text(_dumped(contents), encoding="utf-8", newline="\n")
    print(hashlib.sha256(database).hexdigest())


def _dumped(value: Json) -> str:
    # Write each part of a context on one line.
    return re.sub(r"\{\s+(\"\w+\": .*)\s+\}", r"{\1}", json.dumps(value, indent=1)) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Regenerate the test vectors.")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="change nothing, report differences")
    group.add_argument("--freeze", action="store_true", help="write tests/vectors/format2/")
    options = parser.parse_args(arguments)
    check: bool = options.check
    if options.freeze:
        freeze()
        return 0
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
