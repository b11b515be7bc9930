"""`--json`: every output of every command, failures included, is as docs/cli.schema.json says."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions.maintenance import rotate_data, rotate_master
from tests.cli import schema
from tests.cli.support import Said, begin_trail, commands, confirmed, make_adk_tables, on, run
from tests.maintenance.support import interrupt, run_sql

ARGUMENTS: dict[str, list[str]] = {
    "purge sessions": ["--older-than", "90d"],
    "debug lookup": ["--app", "clinic", "--user", "eve"],
    "erase-user": ["--app", "clinic", "--user", "ada"],
    "debug inspect": ["secure_keyring"],
    "rotate root": ["--also-key", "env:NEW_KEY"],
    "purge blobs": ["--store", "."],
    "migrate copy": ["--from", "sqlite:///adk.db"],
    "migrate compare": ["--from", "sqlite:///adk.db"],
    "migrate erase-source": ["--from", "sqlite:///adk.db", "--dry-run"],
    "migrate artifacts": ["copy", "--from", "adk-artifacts", "--store", "artifacts"],
    "audit export": ["--output", "trail.jsonl"],
    "purge audit": ["--older-than", "90d"],
    "index fill": ["--app", "clinic", "n"],
    "index drop": ["--app", "clinic", "n"],
}
NAMES = [name for name in commands() if name not in ("keygen", "adk doctor")]  # without a database


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item, path)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield path, value


def check(said: Said, name: str) -> Any:
    """Return the output, which must be valid; *name* is a command, or `failure`."""
    schema.validator(name).validate(said.json)
    # A number beyond this is read wrongly by programs that read numbers as floating point.
    assert [found for found in numbers(said.json) if abs(found[1]) > 2**53] == []
    return said.json


def options(name: str) -> set[str]:
    return {text for option in commands()[name].params for text in option.opts}


def arguments(name: str, url: str, key: str | None = "env:OLD_KEY") -> list[str]:
    key = key if "--key" in options(name) else None
    if "audit" in name and "nowhere" not in url:
        asyncio.run(begin_trail(url))
    more = ARGUMENTS.get(name, [])
    if name == "export":
        more = ["--decrypt", "--verify", "--skip-bad", "--to", f"{url}-export"]
    if name == "move-keys":
        more = ["--to", "key-db", "--key-db", url.replace(".db", "-keys.db")]
    if "--confirm" in options(name):
        more = [*more, *confirmed(url)]
    return [*name.split(), *more, *on(url, key, command=name), "--json"]


@pytest.fixture(autouse=True)
def _adk_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources of `migrate`: google-adk's tables, and its directory of artifacts."""
    monkeypatch.chdir(tmp_path)
    make_adk_tables(tmp_path / "adk.db")
    (tmp_path / "adk-artifacts" / "apps").mkdir(parents=True)


@pytest.fixture(scope="module")
def tampered_file(tmp_path_factory: pytest.TempPathFactory, filled_file: bytes) -> bytes:
    """A database with an unfinished rotation of each kind and with bad rows."""
    path = tmp_path_factory.mktemp("tampered") / "sessions.db"
    path.write_bytes(filled_file)
    for rotate in (rotate_data, rotate_master):
        asyncio.run(interrupt(f"sqlite:///{path}", rotate))
    place = sa.URL.create("sqlite", database=str(path))
    run_sql(place, "UPDATE secure_events SET event = x'00' WHERE seq = 1")
    return path.read_bytes()


@pytest.fixture
def tampered(tampered_file: bytes, tmp_path: Path, file_url: str) -> str:
    (tmp_path / "sessions.db").write_bytes(tampered_file)
    return file_url


def test_schema_is_made_from_the_results_of_the_commands() -> None:
    assert schema.FILE.read_text(encoding="utf-8") == schema.text(), "python -m tests.cli.schema"


def test_there_is_a_schema_for_each_command_and_each_describes_all_fields() -> None:
    validator = schema.validator("failure")
    validator.check_schema(validator.schema)
    definitions = validator.schema["$defs"]
    assert set(definitions) == {*NAMES, "adk doctor", "failure", "problem"}

    def objects(of: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if of.get("type") == "object":
            yield of
        for value in of.values():
            if isinstance(value, dict):
                yield from objects(value)

    found = list(objects(definitions))
    assert len(found) > len(NAMES)
    for one in found:
        assert one["additionalProperties"] is False
        assert one["required"] == list(one["properties"])
        assert all(field.get("description") for field in one["properties"].values())


@pytest.mark.parametrize("name", NAMES)
def test_output_of_the_command_is_as_its_schema_says(name: str, file: str) -> None:
    """So is that of a dry run.  A command also leaves metrics: see test_metrics.py."""
    if "--dry-run" in options(name):
        assert check(run(*arguments(name, file), "--dry-run"), name)["dry_run"] is True
    said = run(*arguments(name, file), "--metrics-file", "run.prom")
    assert (said.code, said.stderr) == (0, "")
    dry_run = check(said, name).get("dry_run", False)
    assert dry_run is (name == "migrate erase-source")
    metrics = Path("run.prom").read_text(encoding="utf-8")
    assert re.search(rf'_problems{{command="{name}".*}} 0\b', metrics)


@pytest.mark.parametrize("name", NAMES)
def test_output_that_tells_of_bad_rows_is_as_its_schema_says(name: str, tampered: str) -> None:
    if name.startswith("rotate "):
        run(*arguments("status", tampered))
    said = run(*arguments(name, tampered))
    assert said.code in (0, 1)
    check(said, name)
    if name == "status":
        (one, _) = said.json["unfinished"]
        assert (one["name"], one["is_authentic"]) == ("data", True)


@pytest.mark.parametrize("name", NAMES)
def test_failure_of_the_command_is_an_object_on_stdout_and_a_line_on_stderr(name: str) -> None:
    failure = check(said := run(*arguments(name, "sqlite:////nowhere/x.db")), "failure")
    assert said.code == 2
    assert failure["error"] in ("ConfigurationError", "DatabaseError")
    assert (failure["retryable"], failure["result"]) == (False, None)
    assert said.stderr == f"Error: {failure['message']}\n"


@pytest.mark.parametrize(
    "wrong",
    [
        ["verify"],
        ["verify", "--bad"],
        ["nothing"],
        ["purge", "sessions", "--older-than", "1"],
        ["--bad"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_a_failure_in_json(wrong: list[str]) -> None:
    failure = check(said := run(*wrong, "--json"), "failure")
    assert (said.code, failure["error"]) == (2, "UsageError")
    assert failure["message"] in said.stderr


def test_failure_of_a_later_step_contains_the_result_of_the_first(file: str) -> None:
    failure = check(run("verify", *on(file), "--store", "nowhere", "--json"), "failure")
    assert (failure["error"], failure["result"]["rows"]["events"]) == ("ConfigurationError", 12)
