"""SQL that differs between databases."""

from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions.db.dialects import compile_for_sqlite, decode_any_text, dialect_of


@pytest.mark.parametrize(("names", "sql"), [("ab", "?, ?"), ("aa", ":a, :a"), ("a", ":a")])
def test_statement_for_sqlite_is_compiled_once(names: str, sql: str) -> None:
    statement: Any = sa.select(sa.text(", ".join(f":{name}" for name in names)))
    (text, values_of), both = compile_for_sqlite(statement), {"a": 1, "b": 2}
    assert (text, values_of(both)) == (f"SELECT {sql}", (1, 2) if "?" in sql else both)
    assert compile_for_sqlite(statement) is compile_for_sqlite(statement)


@pytest.mark.parametrize(
    "data", [b"", b"text", "é".encode(), b"\xff\xfe", b"a\x00b", b"\xed\xa0\x80"]
)
def test_any_bytes_are_text_of_sqlite(data: bytes) -> None:
    text = decode_any_text(data)
    text.encode()  # has no surrogates
    assert (text.encode() == data) is (b"\xff" not in data and b"\xed" not in data)


def test_any_text_is_taken_during_the_block_only() -> None:
    engine = sa.create_engine("sqlite://")
    query = "SELECT CAST(x'ff' AS TEXT)"
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        with dialect_of(connection).decoding(connection, decode_any_text):
            assert connection.exec_driver_sql(query).scalar() == "\\xff"
        assert driver.text_factory is str
        decoding = dialect_of(connection).decoding(connection, decode_any_text)
        with pytest.raises(RuntimeError, match="inside"), decoding:
            raise RuntimeError("inside")
        assert driver.text_factory is str
    engine.dispose()
