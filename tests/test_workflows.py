"""The workflows run what developers run, with pinned actions and few permissions.

They cannot run here.  `make lint` and `make lint-workflows` check their syntax and their security.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The environments that test one release of google-adk do not have it.
yaml = pytest.importorskip("yaml", reason="reading the workflows needs PyYAML")

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
assert len(WORKFLOWS) >= 6
MAKEFILE = (ROOT / "Makefile").read_text()
# Besides `make TARGET`.
COMMANDS = {
    ".ci/install-servers",
    "diff --recursive built dist",
    'gh release create "$GITHUB_REF_NAME" --verify-tag --notes-file release-notes.md'
    " dist/* dist.cdx.json",
}
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def content(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = content(path)["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job.get("steps", [])


@each_workflow
def test_workflow_runs_only_targets_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    for step in steps(path):
        if "run" not in step or step["run"] in COMMANDS:
            continue
        make, *named = shlex.split(step["run"])
        assert make == "make", step["run"]
        assert named, step["run"]
        assert set(named) <= targets, step["run"]


def test_one_action_has_one_version_everywhere() -> None:
    versions: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for name, version in re.findall(
            r"uses: ([\w-]+/[\w-]+)[\w/-]*@(.*)$", path.read_text(), re.M
        ):
            versions.setdefault(name, set()).add(version)
    assert len(versions) >= 8
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


@each_workflow
def test_permissions_are_given_to_each_job_alone(path: Path) -> None:
    assert content(path)["permissions"] == {}
    for name, job in jobs(path).items():
        assert job["permissions"], name
        # One that may write does not run this repository's code with all its dependencies.
        writes = {scope for scope, right in job["permissions"].items() if right == "write"}
        runs = [step["run"] for step in job.get("steps", []) if "run" in step]
        if writes:
            assert not [command for command in runs if command.startswith("make")], name


def test_matrix_is_what_the_metadata_and_the_makefile_claim() -> None:
    matrix = jobs(ROOT / ".github" / "workflows" / "ci.yml")["test"]["strategy"]["matrix"]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    assert matrix["python"] == claimed
    systems = [one for one in classifiers if one.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]  # all runners are Ubuntu
    tested = re.search(r"^ADK_MATRIX := (.*)$", MAKEFILE, re.MULTILINE)
    assert tested
    adks = [*matrix["adk"], *(row["adk"] for row in matrix["include"])]
    assert set(adks) == set(tested[1].split())
    package = jobs(ROOT / ".github" / "workflows" / "package.yml")["package"]
    assert package["strategy"]["matrix"]["python"] == claimed


def test_release_is_checked_before_anything_else_and_published_last() -> None:
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    needs = {
        name: {needed} if isinstance(needed := job.get("needs", []), str) else set(needed)
        for name, job in release.items()
    }
    assert [name for name, needed in needs.items() if not needed] == ["check"]
    assert "make release-check" in [step.get("run") for step in release["check"]["steps"]]
    assert needs["publish"] == {"attest"}
    assert needs["attest"] == {"build", "try", "test", "soak"}
    assert release["publish"]["environment"] == "release"
    assert release["publish"]["permissions"] == {"id-token": "write"}


def test_published_files_are_built_where_only_pinned_packages_run() -> None:
    release = jobs(ROOT / ".github" / "workflows" / "release.yml")
    runs = [step["run"] for step in release["build"]["steps"] if "run" in step]
    assert runs == ["make dist"]
    needed = re.search(r"^dist: (\S+) ##", MAKEFILE, re.MULTILINE)
    assert needed
    assert needed[1] == ".venv-release/.installed"
    assert "pip install --quiet --require-hashes" in MAKEFILE
