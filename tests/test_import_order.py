"""Imports point down, so that each layer can be read and tested without those above it."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "adk_secure_sessions"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE

# Lowest first.  A module imports from its own layer or from those below it.
LAYERS = (
    {"errors", "concurrency", "caches", "results", "hiding"},
    {"telemetry"},
    {"audit"},
    {"crypto"},
    {"formats"},
    {"keys"},
    {"backends", "testing"},
    {"db"},
    {"storage"},
    {"service", "listings", "maintenance"},
    {"migration"},
    {"integrations"},
    {"cli"},
    {"__init__", "__main__"},
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
# A module is a backend if its class has an id.
BACKENDS = [name for name, path in MODULES.items() if "    backend_id = " in path.read_text()]
assert len(BACKENDS) >= 3, "backends not found: an empty search must not pass as success"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Yield the absolute name of each import of *path*, also of those inside functions."""
    yield from imported_by(ast.walk(parsed(path)))


def imported_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            assert node.module
            # `from package import name` may import a module or something in one.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module: str) -> set[str]:
    """The modules of this package that *module* imports, without the package's name."""
    found = set()
    for name in imported(MODULES[module]):
        if name.split(".")[0] != PACKAGE:
            continue
        inner = name.removeprefix(PACKAGE).removeprefix(".")
        while inner and inner not in MODULES:
            inner = inner.rpartition(".")[0]
        found.add(inner or "__init__")
    return found


def rank(module: str) -> int:
    part = module.split(".")[0]
    assert part in RANK, f"{part} is in no layer: give it one in LAYERS"
    return RANK[part]


# One test for all modules: pytest takes longer over a test than over a module.


def test_imports_point_down() -> None:
    above = {
        module: sorted(other for other in own_imports(module) if rank(other) > rank(module))
        for module in MODULES
    }
    assert [pair for pair in above.items() if pair[1]] == [], "these import from layers above them"


ABOVE_STORAGE = [module for module in MODULES if rank(module) > RANK["storage"]]


# The modules of `storage` that other packages may import, and how many names of them they use.
SURFACE = {
    "clusters",
    "feature_list",
    "features.audit_trail",
    "features.collections",
    "features.expiry",
    "features.imports",
    "features.index_rows",
    "features.search_index",
    "key_operations",
    "meta",
    "opening",
    "operation_runner",
    "queries",
    "reads",
    "schema",
    "survey",
    "table_walk",
    "writes",
}
MOST_NAMES = 68


def test_modules_above_storage_import_only_its_surface() -> None:
    assert len(ABOVE_STORAGE) > 20
    used = {
        name.removeprefix(f"{PACKAGE}.storage.")
        for module in ABOVE_STORAGE
        for name in imported(MODULES[module])
        if name.startswith(f"{PACKAGE}.storage.")
    }
    modules = {name if name in SURFACE else name.rpartition(".")[0] for name in used}
    assert modules <= SURFACE
    assert len(used) <= MOST_NAMES, "each name that leaves storage is one more to understand"


def test_no_two_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in names.items() if number > 1] == []


@pytest.mark.parametrize("module", BACKENDS)
def test_no_backend_imports_another(module: str) -> None:
    assert not own_imports(module) & set(BACKENDS)


def test_ciphers_and_sql_stay_in_their_layers() -> None:
    for module, path in MODULES.items():
        libraries = {name.split(".")[0] for name in imported(path)}
        if rank(module) >= RANK["db"]:
            assert "cryptography" not in libraries, module
        if rank(module) < RANK["db"]:
            assert not libraries & {"sqlalchemy", "sqlite3", "aiosqlite"}, module


def test_command_line_does_not_wait_for_google_adk() -> None:
    program = "import sys, adk_secure_sessions.cli; print('google.adk' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


OPTIONAL = {
    "aiobotocore",
    "boto3",
    "botocore",
    "google_crc32c",
    "grpc",
    "httpx",
    "obstore",
    "pkcs11",
}


def test_optional_libraries_are_imported_where_they_are_used() -> None:
    """The package can be imported without them."""
    for module, path in MODULES.items():
        tree = parsed(path)
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = set(imported_by(at_once))
        of_google = {name for name in names if name.startswith(("google.cloud", "google.api_core"))}
        assert not of_google, module
        assert not {name.split(".")[0] for name in names} & {*OPTIONAL, "pytest"}, module
