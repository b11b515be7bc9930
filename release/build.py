"""Build the source distribution and the wheel, and prove that a second build has the same bytes.

Usage: python -m release.build DIRECTORY

The first build starts from this repository.  The second one starts from the unpacked source
distribution, in another folder, with another umask and time zone.  Both use the installed
hatchling: a different release of hatchling may produce other bytes.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def source_date() -> str | None:
    """Return the time that the files in the archives get, in seconds since 1970.

    It is the time of the last commit, unless SOURCE_DATE_EPOCH is set.  Without git, hatchling has
    a time of its own.
    """
    if "SOURCE_DATE_EPOCH" in os.environ:
        return os.environ["SOURCE_DATE_EPOCH"]
    if not (ROOT / ".git").exists():
        return None
    shown = subprocess.run(
        ["git", "log", "-1", "--format=%ct"],  # noqa: S607
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return shown.stdout.strip()


def build(source: Path, target: Path, **env: str) -> list[Path]:
    """Build a source distribution from *source*, and from that a wheel; return both, sorted."""
    subprocess.run(
        [
            sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check",
            "--outdir", str(target), str(source),
        ],
        env=os.environ | env, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return sorted(target.iterdir())


def unpack(sdist: Path, target: Path) -> Path:
    """Unpack *sdist* into *target*, and return its top folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (top,) = target.iterdir()
    return top


def main(arguments: list[str]) -> int:
    target = Path(arguments[0])
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        print(f"{target} is not empty", file=sys.stderr)
        return 2
    date = source_date()
    dated = {} if date is None else {"SOURCE_DATE_EPOCH": date}
    first = build(ROOT, target, **dated)
    (sdist,) = (path for path in first if path.name.endswith(".tar.gz"))
    with tempfile.TemporaryDirectory() as folder:
        inner = unpack(sdist, Path(folder, "source"))
        before = os.umask(0o077)
        try:
            second = build(inner, Path(folder, "second"), TZ="Pacific/Auckland", **dated)
        finally:
            os.umask(before)
        different = [
            one.name
            for one, other in zip(first, second, strict=True)
            if one.read_bytes() != other.read_bytes()
        ]
    if different:
        print(f"a second build has other bytes: {', '.join(different)}", file=sys.stderr)
        return 1
    for path in first:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
