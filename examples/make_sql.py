"""Regenerate docs/sql/: the scripts that create the tables if the service's account may not.

    python examples/make_sql.py [--check]

With `--check`, it changes nothing and exits with 1 if a file would change.
"""

import argparse
import itertools
import sys
from pathlib import Path

import sqlalchemy as sa

from adk_secure_sessions.storage.schema import (
    audit_records,
    events,
    feature_metadata,
    metadata,
    migrated,
    snapshots,
    state_index,
)
from adk_secure_sessions.storage.survey import TableSet

DIRECTORY = Path(__file__).resolve().parent.parent / "docs" / "sql"
URLS = {"postgresql": "postgresql+asyncpg://", "mysql": "mysql+asyncmy://", "sqlite": "sqlite://"}
PARTS = {
    "": (TableSet.ALL.tables, "The tables of adk-secure-sessions"),
    "-keys": (TableSet.KEYS.tables, "The tables of a key database of adk-secure-sessions"),
    "-data": (
        TableSet.DATA.tables,
        "The tables of adk-secure-sessions, without those of the key database",
    ),
    "-migration": (
        (migrated,),
        "The table that `migrate` adds to the data tables of adk-secure-sessions",
    ),
    "-audit": (
        (audit_records,),
        "The table that `Audit(table=True)` adds to the data tables of adk-secure-sessions",
    ),
    "-state-index": (
        (state_index,),
        "The table that the search index adds to the data tables of adk-secure-sessions",
    ),
}
HEAD = """\
-- {what}, for {database}.
-- Run this script once{account}.
-- Pass create_tables=False to the service.
{role}
"""
ACCOUNT = ", with the account that is to own the tables"
# The role to which the scripts grant permissions.
ROLE = "secure_service"
HEAD_OF_ROLE = f"""\
-- The script grants permissions to the role {ROLE}.  Create this role first, and grant it to
-- the account of the service.
"""
HEAD_OF_PARTITIONING = """\
-- Divides the tables of events and snapshots of an existing database, for PostgreSQL.
-- Stop all services and run this script with the account that owns the tables:
-- psql -v ON_ERROR_STOP=1 -f postgresql-partitioning.sql

"""
PARTITIONED = (snapshots.name, events.name)
PARTITIONS = 16
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
    account, role = ACCOUNT, HEAD_OF_ROLE
    if database == "sqlite":
        account = role = ""
    else:
        statements.append("".join(f"{grant(table.name)};\n" for table in tables))
    head = HEAD.format(what=what, database=NAMES[database], account=account, role=role)
    return head + "\n".join(statements)


def grant(table: str) -> str:
    """Return the statement that grants what services need on *table*."""
    audited = table == audit_records.name  # nobody who can only write may remove records
    permissions = "SELECT, INSERT" if audited else "SELECT, INSERT, UPDATE, DELETE"
    return f"GRANT {permissions} ON {table} TO {ROLE}"


def partitioned() -> str:
    """Return the script for PostgreSQL in which events and snapshots are in `PARTITIONS` tables."""
    text = script("postgresql", "")
    for table in PARTITIONED:
        start = text.index(f"CREATE TABLE {table} (")
        end = text.index(";\n", start)
        text = f"{text[:end]} PARTITION BY HASH (session_row){text[end:]}"
        text += "".join(
            f"\nCREATE TABLE {table}_{number:02} PARTITION OF {table}\n"
            f"  FOR VALUES WITH (MODULUS {PARTITIONS}, REMAINDER {number});\n"
            for number in range(PARTITIONS)
        )
    return text


def partitioning() -> str:
    """Return the script that moves the rows of an existing database into such tables."""
    created = [part for part in partitioned().split(";\n\n") if _creates(part)]
    moved = [f"INSERT INTO {table} SELECT * FROM whole_{table}" for table in PARTITIONED]
    return (
        HEAD_OF_PARTITIONING
        + ";\n\n".join(
            [
                "BEGIN",
                *(f"ALTER TABLE {table} RENAME TO whole_{table}" for table in PARTITIONED),
                *(part.rstrip(";\n") for part in created),
                *moved,
                *(f"DROP TABLE whole_{table}" for table in PARTITIONED),
                *map(grant, PARTITIONED),
                "COMMIT",
                *(f"VACUUM ANALYZE {table}" for table in PARTITIONED),
                "",
            ]
        ).rstrip("\n")
        + "\n"
    )


def _creates(statement: str) -> bool:
    """Return whether *statement* creates or changes a partitioned table or a partition."""
    return any(f" TABLE {table}" in statement for table in PARTITIONED)


def statements(name: str, grantee: str = "CURRENT_USER") -> list[str]:
    """Return the statements of a script in docs/sql, which grant permissions to *grantee*."""
    text = (DIRECTORY / f"{name}.sql").read_text(encoding="utf-8").replace(ROLE, grantee)
    return [part.strip() for part in text.split(";\n") if part.strip()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Regenerate docs/sql/.")
    parser.add_argument("--check", action="store_true", help="change nothing, report differences")
    check: bool = parser.parse_args(arguments).check
    different = 0
    scripts = {
        f"{database}{part}": script(database, part)
        for database, part in itertools.product(URLS, PARTS)
    }
    scripts["postgresql-partitioned"] = partitioned()
    scripts["postgresql-partitioning"] = partitioning()
    for name, text in scripts.items():
        path = DIRECTORY / f"{name}.sql"
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
