"""List what an installation of the wheel contains, as CycloneDX, and check the licences.

Usage: python -m release.sbom WHEEL FILE

The list has the packages that an installer chooses today for this package with all extras that
users may choose.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from release.build import ROOT
from release.environments import clean_environment, run

EXTRAS = "artifacts,aws,gcp,mysql,pkcs11,postgresql,vault"
# Licences that allow to use a library in any application.  MPL-2.0 asks only for changes of the
# library's own files.
ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "PSF-2.0",
    "Python-2.0",
    "Unlicense",
    "Zlib",
    # Metadata of older forms.
    "License :: OSI Approved :: Apache Software License",
    "License :: OSI Approved :: BSD License",
    "License :: OSI Approved :: MIT License",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
}
# Packages whose metadata names no licence of the list above, and the licence that their own files
# contain.
READ_BY_HAND = {"protobuf": "BSD-3-Clause"}


def spdx_ids(component: dict[str, Any]) -> set[str]:
    """Return the parts of the component's licences: SPDX ids, or the texts of its metadata."""
    found: set[str] = set()
    for entry in component.get("licenses", []):
        if "expression" in entry:
            found |= {part.strip("() ") for part in re.split(" AND | OR ", entry["expression"])}
        else:
            found.add(entry["license"].get("id") or entry["license"].get("name", ""))
    return found


def rejected(bom: dict[str, Any]) -> dict[str, list[str]]:
    """Return the components without a licence, or with one that is not allowed."""
    found = {}
    for component in bom["components"]:
        known = READ_BY_HAND.get(component["name"])
        ids = {known} if known is not None else spdx_ids(component)
        if not ids or not ids <= ALLOWED:
            found[component["name"]] = sorted(ids)
    return found


def main(arguments: list[str]) -> int:
    wheel, target = (Path(argument).resolve() for argument in arguments)
    program = Path(sys.executable).parent / "cyclonedx-py"
    with tempfile.TemporaryDirectory() as folder:
        python = clean_environment(Path(folder, "env"), f"{wheel}[{EXTRAS}]")
        run(
            program, "environment", "--pyproject", ROOT / "pyproject.toml", "--mc-type", "library",
            "--output-reproducible", "-o", target, python,
        )  # fmt: skip
    bom = json.loads(target.read_text(encoding="utf-8"))
    for name, ids in sorted(rejected(bom).items()):
        print(f"{name}: check its licence: {', '.join(ids) or 'none'}", file=sys.stderr)
    print(f"{target.name}: {len(bom['components'])} packages")
    return 1 if rejected(bom) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
