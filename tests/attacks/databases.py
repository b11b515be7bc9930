"""Which databases an attack runs on.

Every case runs on SQLite with AES-256-GCM.  `@also_on("fernet", "postgresql")` lists where a test
runs besides: with Fernet, on records that are compressed and padded ("packed"), on SQLite through
an engine of the caller's (which converts types), on PostgreSQL, on MariaDB.  There, only the first
case runs, or those that `cases=["event"]` names; `make soak` runs every case everywhere.  The
service decides what is rejected, not the database, and the format is the same on all of them.  So a
few attacks on each kind of row, and those that depend on the database's types, schema or
constraints, are enough to show that the answer is the same on another database.
"""

from collections.abc import Collection, Mapping

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


def choose(metafunc: pytest.Metafunc) -> None:
    """Mark with `soak` what runs on other databases and is not listed to."""
    listed = metafunc.definition.get_closest_marker("also_on") or also_on().mark
    cases, first = listed.kwargs["cases"], None
    for call in metafunc._calls:
        if (database := _other_database(call.params)) is None:
            continue
        call.marks.append(pytest.mark.no_cover.mark)  # it reaches no code that the others do not
        case = "-".join(part for part in call.id.split("-") if part != database)
        first = case if first is None else first
        chosen = cases & {case, *case.split("-")} if cases else case == first
        if not chosen or database not in listed.args:
            call.marks.append(pytest.mark.soak.mark)


def _other_database(parameters: Mapping[str, object]) -> str | None:
    return next(
        (str(parameters[name]) for name in FIXTURES if parameters.get(name) in OTHERS), None
    )
