"""Which databases an attack runs on.

Every case runs on SQLite with AES-256-GCM.  `@also_on("fernet", "postgresql")` lists where a test
runs besides: with Fernet, on records that are compressed and padded ("packed"), on SQLite through
an engine of the caller's (which converts types), on PostgreSQL, on MariaDB.  There, only the first
case runs, or those that `cases=["event"]` names; `make soak` runs every case everywhere.  The
service decides what is rejected, not the database, and the format is the same on all of them.  So a
few attacks on each kind of row, and those that depend on the database's types, schema or
constraints, are enough to show that the answer is the same on another database.
"""

from collections.abc import Collection

import pytest

SERVERS = ("postgresql", "mariadb")
# The fixtures of conftest.py that give the database, and those of their parameters that stand for
# another one than SQLite with AES-256-GCM.
FIXTURES = ("db", "typed_db", "aes_db", "file_db", "server_db")
OTHERS = ("fernet", "packed", "engine", *SERVERS)


def also_on(*databases: str, cases: Collection[str] = ()) -> pytest.MarkDecorator:
    """Run the first case of each test, or its *cases*, on *databases* as well.

    A case is named by its id, or by the id of one of its parameters.
    """
    assert set(databases) <= set(OTHERS), databases
    return pytest.mark.also_on(*databases, cases=frozenset(cases))


def choose(items: list[pytest.Item]) -> None:
    """Mark with `soak` what runs on other databases and is not listed to."""
    firsts: dict[str, str] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or (database := _other_database(item)) is None:
            continue
        item.add_marker(pytest.mark.no_cover)  # it reaches no code that the others do not
        listed = item.get_closest_marker("also_on") or also_on().mark
        case = "-".join(part for part in item.callspec.id.split("-") if part != database)
        first = firsts.setdefault(item.nodeid.partition("[")[0], case)
        cases = listed.kwargs["cases"]
        chosen = cases & {case, *case.split("-")} if cases else case == first
        if not chosen or database not in listed.args:
            item.add_marker(pytest.mark.soak)


def _other_database(item: pytest.Function) -> str | None:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return next(
        (str(parameters[name]) for name in FIXTURES if parameters.get(name) in OTHERS), None
    )
