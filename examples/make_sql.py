"""Regenerate docs/sql/: the scripts that create the tables if the service's account may not.

    python examples/make_sql.py [--check]

With `--check`, it changes nothing and exits with 1 if a file would change.
"""

import argparse
import itertools
import sys
from pathlib import Path

import sqlalchemy as sa

from adk_secure_sessions.storage.opening import Part
from adk_secure_sessions.storage.schema import feature_metadata, indexed, metadata, migrated

DIRECTORY = Path(__file__).resolve().parent.parent / "docs" / "sql"
URLS = {"postgresql": "postgresql+asyncpg://", "mysql": "mysql+asyncmy://", "sqlite": "sqlite://"}
PARTS = {
    "": (Part.ALL.tables, "The tables of adk-secure-sessions"),
    "-keys": (Part.KEYS.tables, "The tables of a key database of adk-secure-sessions"),
    "-data": (
        Part.DATA.tables,
        "The tables of adk-secure-sessions, without those of the key database",
    ),
    "-migration": (
        (migrated,),
        "The table that `migrate` adds to the data tables of adk-secure-sessions",
    ),
    "-state-index": (
        (indexed,),
        "The table that the search index adds to the data tables of adk-secure-sessions",
    ),
}
HEAD = """\
-- {what}, for {database}.
-- Run this script once, with the account that is to own the tables.  Grant SELECT, INSERT, UPDATE
-- and DELETE on the tables to the service's account, and pass create_tables=False to the service.

"""
NAMES = {"postgresql": "PostgreSQL", "mysql": "MySQL and MariaDB", "sqlite": "SQLite"}


def script(database: str, part: str) -> str:
    """Return the text of one script: a comment, then the statements in the order to run them."""
    statements: list[str] = []

    def collect(statement: sa.schema.ExecutableDDLElement, *_: object, **__: object) -> None:
        text = str(statement.compile(dialect=engine.dialect))
        lines = [line.rstrip().replace("\t", "  ") for line in text.strip().splitlines()]
        statements.append("\n".join(lines).replace(")ENGINE", ") ENGINE") + ";\n")

    engine = sa.create_mock_engine(URLS[database], collect)
    tables, what = PARTS[part]
    for of in (metadata, feature_metadata):
        mine = [table for table in tables if table.metadata is of]
        of.create_all(engine, tables=mine, checkfirst=False)
    return HEAD.format(what=what, database=NAMES[database]) + "\n".join(statements)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Regenerate docs/sql/.")
    parser.add_argument("--check", action="store_true", help="change nothing, report differences")
    check: bool = parser.parse_args(arguments).check
    different = 0
    for database, part in itertools.product(URLS, PARTS):
        path = DIRECTORY / f"{database}{part}.sql"
        text = script(database, part)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        different += 1
        if check:
            print(f"{path.name} is out of date: run examples/make_sql.py", file=sys.stderr)
        else:
            DIRECTORY.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
