"""Names, defaults and messages on the pages are those of the code."""

import ast
import inspect
import re
from pathlib import Path
from statistics import median

import pytest

import adk_secure_sessions
from adk_secure_sessions import EncryptedSessionService, maintenance
from adk_secure_sessions.formats import json_text
from adk_secure_sessions.formats.json_text import MAX_KEY_BYTES, MAX_STATE_LEVELS
from adk_secure_sessions.keys import specs
from adk_secure_sessions.service import MAX_ID_BYTES
from tests.benchmarks import plan
from tests.benchmarks.report import RESULTS
from tests.benchmarks.results import Results
from tests.pages import DOCS, PAGES, PROJECT, ROOT, blocks, language, public_names

ATTACKS = ROOT / "tests" / "attacks"
INTEGRATIONS = ROOT / "tests" / "integrations"
CONFORMANCE = ROOT / "tests" / "conformance"


def cells(page: str) -> list[list[str]]:
    """Return the rows of a page's tables, with their heads."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    assert len(rows) > 2, "no table found: an empty one must not pass as success"
    return [[cell.strip() for cell in row] for row in rows]


def named_in(text: str) -> list[tuple[str, str]]:
    """Return the files and the words of "`test_file.py -k word`"."""
    return re.findall(r"`(test_\w+\.py) -k (\w+)`", text)


# --- the threat model ----------------------------------------------------------------------------

TRIED = [named for row in cells("threats.md") for named in named_in(row[-1])]


def names_in(file: str, folder: Path = ATTACKS) -> list[str]:
    tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in tree.body if isinstance(node, functions)]
    return [name for name in names if name.startswith("test_")]


def test_every_attack_in_the_threat_model_names_its_tests() -> None:
    rows = [
        row for row in cells("threats.md") if not row[0].startswith(("attack", "mistake", "--"))
    ]
    assert rows
    assert all(len(row) == 3 and named_in(row[-1]) for row in rows)


def test_tests_that_the_threat_model_names_exist() -> None:
    for file, word in TRIED:
        folder = ATTACKS if (ATTACKS / file).exists() else INTEGRATIONS
        assert any(word in name for name in names_in(file, folder)), (file, word)


def test_threat_model_names_every_file_of_attacks() -> None:
    files = [*ATTACKS.glob("test_*.py"), *INTEGRATIONS.glob("test_*_attacks.py")]
    assert {path.name for path in files} <= {file for file, _ in TRIED}


# --- differences from ADK's service --------------------------------------------------------------


DIFFERENCES = (
    (DOCS / "limits.md").read_text(encoding="utf-8").partition("\n## Differences from ")[2]
)


def test_every_difference_names_tests_that_exist() -> None:
    rows = [row for row in DIFFERENCES.splitlines() if row.startswith("|")][2:]
    named = [named_in(row) for row in rows]
    assert {len(of_row) for of_row in named} == {1}
    for ((file, word),) in named:
        assert any(word in name for name in names_in(file, CONFORMANCE)), (file, word)


def test_page_of_differences_names_every_test_of_them() -> None:
    words = [word for file, word in named_in(DIFFERENCES) if file == "test_differences.py"]
    for name in names_in("test_differences.py", CONFORMANCE):
        assert any(word in name for word in words), name


# --- limits --------------------------------------------------------------------------------------


def test_limits_on_the_page_are_those_of_the_code() -> None:
    page = (DOCS / "limits.md").read_text(encoding="utf-8")
    for limit in (
        f"{MAX_STATE_LEVELS - 1} levels in a value of a state; {json_text.MAX_LEVELS} levels",
        f"{json_text.MAX_DIGITS} digits",
        f"{MAX_KEY_BYTES} bytes",
        f"{json_text.MAX_BYTES // 2**20} MiB",
        f"{MAX_ID_BYTES} bytes",
    ):
        assert limit in page


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["threats.md", "troubleshooting.md", "limits.md"])
def test_errors_that_the_page_names_exist(page: str) -> None:
    named = set(re.findall(r"`(\w+Error)`", (DOCS / page).read_text(encoding="utf-8")))
    adks = {"AlreadyExistsError", "SessionNotFoundError", "StaleSessionError"}
    others = {
        "NotImplementedError",
        "TypeError",
        "UnicodeDecodeError",
        "UnicodeEncodeError",
        "ValueError",
    }
    others.add("PydanticSerializationError")
    assert named - adks - others <= set(adk_secure_sessions.__all__)


# --- configuration -------------------------------------------------------------------------------


def test_configuration_gives_the_arguments_of_the_service_and_their_defaults() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in cells("configuration.md")}
    for name, parameter in inspect.signature(EncryptedSessionService).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            assert f"**{name}" in rows
        else:
            shown = "none" if parameter.default is None else str(parameter.default)
            assert rows[name] == shown


def test_table_of_key_specs_gives_every_scheme() -> None:
    named = [re.match(r'`AesGcmBackend\("([\w-]+):', row[0]) for row in cells("key-services.md")]
    assert specs._SCHEMES.keys() <= {name[1] for name in named if name}


def test_pages_give_every_message_that_is_logged() -> None:
    given = {
        row[1].strip("`").rstrip(" …")
        for row in cells("configuration.md")
        if row[0] in ("info", "warning", "error")
    }
    remedies = (DOCS / "troubleshooting.md").read_text("utf-8").partition("## Damaged rows")[2]
    rows = [line for line in remedies.splitlines() if line.startswith("| ")]
    entries = [text for row in rows for text in re.findall("`([^`]+)`", row.split(" | ")[0])]
    given |= {text.partition(" ...")[0] for text in entries} - {""}
    logged = []
    for path in Path(adk_secure_sessions.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and (node.func.value.id, node.func.attr)
                in (("logger", "warning"), ("logger", "error"))
            ):
                logged.append(ast.literal_eval(node.args[0]))
    assert logged
    logged = [text.replace("%d", "64").replace("`", "") for text in logged]
    assert "" not in given
    assert [text for text in logged if not text.startswith(tuple(given))] == []


# --- the API -------------------------------------------------------------------------------------

API = (DOCS / "api.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^::: (\S+)$", API, re.MULTILINE)


@pytest.mark.parametrize("name", adk_secure_sessions.__all__)
def test_reference_has_the_public_name(name: str) -> None:
    assert f"adk_secure_sessions.{name}" in ENTRIES


def test_no_name_has_two_entries() -> None:
    assert [name for name in set(ENTRIES) if ENTRIES.count(name) > 1] == []


def test_reference_has_every_public_name_outside_the_package_itself() -> None:
    """The names of `maintenance`, and those that a reader of another page imports."""
    used = {("adk_secure_sessions.maintenance", name) for name in public_names(maintenance)}
    internal = [DOCS / "architecture.md", DOCS / "format.md"]
    for page in (one for one in PAGES if one not in internal):
        for _, block in blocks(page).regions:
            if language(block) == "python":
                used |= imports(str(block.parsed["source"]))
    modules = {module for module, _ in used}
    assert {"adk_secure_sessions", "adk_secure_sessions.maintenance"} <= modules
    missing = {
        f"{module}.{name}"
        for module, name in used - {("adk_secure_sessions.integrations", "adk")}  # a module
        if module != "adk_secure_sessions"
        if not {f"{module}.{name}", f"{module}.{name}.{name}"} & set(ENTRIES)
    }
    assert missing == set()


# Names of the API that need care, and words of the note beside each.
DANGERS = [
    ("EncryptedSessionService", "additional_backends"),
    ("EncryptedSessionService", "skip_unreadable_sessions"),
    ("EncryptedSessionWrapper", "removed or reordered"),
    ("EncryptionBackend", "nonce"),
    ("FernetBackend", "time of its encryption"),
    ("KeyProvider", "associated_data"),
    ("NoOpBackend", "authenticates nothing"),
    ("PassphraseKey", "short or common"),
    ("StaticKey", "memory of the process"),
    ("VaultKey", "deleted in the key service"),
    ("generate_key", "lose the root key"),
    ("integrations.adk.register", "plaintext"),
    ("integrations.blob_rotation.rotate_data_and_blobs", "deletes the old contents"),
    ("integrations.memory.MemoryRanker", "decrypted texts"),
    ("maintenance.erase_user", "backup"),
    ("maintenance.move_keys.move_keys", "Stop all services"),
    ("maintenance.retire.retire", "backup"),
    ("maintenance.rotate_root.rotate_root", "old root key"),
    ("maintenance.separate.separate", "only on a copy"),
    ("migration.PlaintextFallbackService", "forge sessions"),
    ("migration.open_source", "do not authenticate"),
    ("migration.erase_source.erase_source", "deletes the plaintext"),
    ("migration.export_lines", "plaintext"),
    ("migration.export_to_adk", "plaintext"),
]


@pytest.mark.parametrize(("name", "word"), DANGERS, ids=lambda part: part)
def test_danger_is_said_before_the_entry(name: str, word: str) -> None:
    """In an admonition of its section, or at the start of its page."""
    assert f"adk_secure_sessions.{name}" in ENTRIES
    before = API.partition(f"\n::: adk_secure_sessions.{name}\n")[0]
    sections = re.split(r"^## ", before, flags=re.MULTILINE)
    notes = re.findall(
        r"^!!! (?:danger|warning)\n((?: {4}.*\n|\n)+)",
        f"{sections[0]}\n{sections[-1]}\n",
        re.MULTILINE,
    )
    assert any(word in " ".join(note.split()) for note in notes)


def test_figures_of_the_front_and_the_comparison_are_those_of_the_benchmarks() -> None:
    page = " ".join((DOCS / "comparison.md").read_text(encoding="utf-8").split())
    figures = Results.load(RESULTS).figures
    operations = [
        figure.value
        for name, figure in figures.items()
        if re.fullmatch(r"(sqlite|postgresql|remote)/(?!memory).*/relative to adk", name)
        and "cold/new service" not in name  # which also opens the service
    ]
    assert len(operations) > 30
    assert max(operations) < 0.5
    of_sqlite = [
        figure.value for name, figure in figures.items() if name.endswith("/relative to adk-sqlite")
    ]
    assert len(of_sqlite) > 10
    assert median(of_sqlite) < 0.5
    for other in (DOCS / "comparison.md", DOCS / "index.md", DOCS.parent / "README.md"):
        text = " ".join(other.read_text(encoding="utf-8").split())
        assert (
            "less than half the time of ADK's unencrypted `DatabaseSessionService`. Most take less "
            "than half the time of ADK's `SqliteSessionService`, too"
        ) in text
    for backend, said, most in (
        ("aesgcm", "less than 10 %", 1.1),
        ("fernet", "less than 20 %", 1.2),
    ):
        found = [
            figure.value
            for name, figure in figures.items()
            if name.startswith(f"round trip/{backend}/") and name.endswith("/overhead")
        ]
        assert len(found) == 4
        assert max(found) < most
        assert said in page


def test_costs_of_telemetry_are_those_of_the_benchmarks() -> None:
    figures = Results.load(RESULTS).figures
    rows = [row for row in cells("telemetry.md") if row[0] in plan.TELEMETRY]
    assert len(rows) == len(plan.TELEMETRY) * len(plan.TELEMETRY_OPERATIONS)
    for providers, operation, total, own in rows:
        name = f"telemetry/{providers}/{operation}/relative to"
        assert total == figures[f"{name} no telemetry"].text
        if own:
            assert own == figures[f"{name} bare calls"].text
        else:
            assert providers == plan.TELEMETRY_OFF


def test_no_page_lists_mysql_among_the_databases_that_the_tests_run_on() -> None:
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        text = " ".join(path.read_text(encoding="utf-8").split())
        listed = re.findall(r"SQLite, PostgreSQL(?: \([^)]*\))?,? (?:or |and )?MySQL[^.]*", text)
        assert listed == [], path.name


def test_every_extra_is_in_the_tutorial() -> None:
    rows = [row[0] for row in cells("tutorial.md")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(PROJECT["optional-dependencies"])


def imports(code: str) -> set[tuple[str, str]]:
    """The names that *code* imports from this package, with their modules."""
    return {
        (node.module, name.name)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.startswith("adk_secure_sessions")
        for name in node.names
    }


def test_adks_errors_are_where_the_page_says() -> None:
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import SessionNotFoundError

    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    for error in (AlreadyExistsError, SessionNotFoundError):
        assert f"`{error.__name__}`, from `{error.__module__}`" in page
