"""Running the steps of a transaction one statement at a time."""

from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from adk_secure_sessions.db.protocol import (
    Apply,
    Change,
    Conflict,
    Executors,
    Parameters,
    Read,
    Rows,
    Steps,
    run_in_turn,
)

QUERY, FIRST, SECOND, THIRD = (sa.text(name) for name in ("query", "first", "second", "third"))


class Database:
    """Answers with *rows*, and how many rows each change *matches*; records what it is asked."""

    def __init__(self, rows: Sequence[Any] = (), **matches: int) -> None:
        self.rows = rows
        self.matches = matches
        self.asked: list[tuple[str, Parameters | Rows]] = []

    def fetch(self, query: sa.Executable, parameters: Parameters) -> Sequence[Any]:
        self.asked.append((str(query), parameters))
        return self.rows

    def run(self, statement: sa.Executable, parameters: Parameters | Rows) -> int:
        self.asked.append((str(statement), parameters))
        return self.matches.get(str(statement), 1)

    @property
    def statements(self) -> list[str]:
        return [statement for statement, _ in self.asked]


def apply_all(*changes: Change) -> Steps[bool]:
    made: bool = yield Apply(changes)
    return made


def test_rows_are_the_answer_to_a_read_and_the_return_value_is_the_result() -> None:
    database = Database(rows=[(1,), (2,)])

    def total() -> Steps[int]:
        rows = yield Read(QUERY, {"limit": 2})
        return sum(row[0] for row in rows)

    assert run_in_turn(total(), database.fetch, database.run) == 3
    assert database.asked == [("query", {"limit": 2})]


def test_changes_are_made_in_order_with_their_parameters() -> None:
    database = Database()
    changes = [Change(FIRST, {"a": 1}), Change(SECOND, {"a": 2}), Change(THIRD, {})]
    assert run_in_turn(apply_all(*changes), database.fetch, database.run) is True
    assert database.asked == [("first", {"a": 1}), ("second", {"a": 2}), ("third", {})]


def test_change_with_rows_is_run_with_all_of_them() -> None:
    database = Database(second=2)
    rows = [{"a": 1}, {"a": 2}]
    steps = apply_all(Change(FIRST, {}), Change(SECOND, {}, must_match_row=False, rows=rows))
    assert run_in_turn(steps, database.fetch, database.run) is True
    assert database.asked == [("first", {}), ("second", rows)]


def test_first_change_that_matches_no_row_is_the_answer_false_and_the_rest_is_not_tried() -> None:
    database = Database(first=0)
    steps = apply_all(Change(FIRST, {}), Change(SECOND, {}))
    assert run_in_turn(steps, database.fetch, database.run) is False
    assert database.statements == ["first"]


@pytest.mark.parametrize("matched", [0, 2])
def test_later_change_that_matches_another_number_of_rows_than_one_is_a_conflict(
    matched: int,
) -> None:
    database = Database(second=matched)
    steps = apply_all(Change(FIRST, {}), Change(SECOND, {}), Change(THIRD, {}))
    with pytest.raises(Conflict):
        run_in_turn(steps, database.fetch, database.run)
    assert database.statements == ["first", "second"]


ON_CLUSTER = Change(THIRD, {}, only_on_cluster=True)


@pytest.mark.parametrize("is_cluster", [True, False])
@pytest.mark.parametrize(("first", "applied"), [(1, True), (0, False)])
def test_change_for_clusters_is_made_only_there_and_does_not_count_as_the_first(
    is_cluster: bool, first: int, applied: bool
) -> None:
    database = Database(first=first)
    steps = apply_all(ON_CLUSTER, Change(FIRST, {}))
    assert run_in_turn(steps, database.fetch, database.run, is_cluster=is_cluster) is applied
    assert database.statements == (["third", "first"] if is_cluster else ["first"])


@pytest.mark.parametrize("matched", [0, 2])
def test_claim_that_matches_another_number_of_rows_than_one_is_a_conflict(matched: int) -> None:
    database = Database(third=matched)
    steps = apply_all(Change(FIRST, {}), ON_CLUSTER)
    with pytest.raises(Conflict):
        run_in_turn(steps, database.fetch, database.run, is_cluster=True)
    assert database.statements == ["first", "third"]


@pytest.mark.parametrize("matched", [0, 1, 7])
def test_change_that_need_not_match_a_row_may_match_any_number(matched: int) -> None:
    database = Database(second=matched)
    steps = apply_all(Change(FIRST, {}), Change(SECOND, {}, must_match_row=False))
    assert run_in_turn(steps, database.fetch, database.run) is True


def test_transaction_goes_on_after_the_answer_false() -> None:
    database = Database(first=0)

    def twice() -> Steps[list[bool]]:
        return [(yield Apply([Change(FIRST, {})])), (yield Apply([Change(SECOND, {})]))]

    assert run_in_turn(twice(), database.fetch, database.run) == [False, True]


def test_transaction_that_asks_nothing_has_a_result() -> None:
    database = Database()

    def idle() -> Steps[str]:
        yield from ()
        return "done"

    assert run_in_turn(idle(), database.fetch, database.run) == "done"


def test_error_of_the_transaction_or_the_database_is_raised() -> None:
    database = Database()

    def broken() -> Steps[None]:
        yield Read(QUERY, {})
        raise RuntimeError("the transaction's own")

    with pytest.raises(RuntimeError, match="the transaction's own"):
        run_in_turn(broken(), database.fetch, database.run)

    def fail(*_: object) -> int:
        raise OSError("the database's")

    with pytest.raises(OSError, match="the database's"):
        run_in_turn(apply_all(Change(FIRST, {})), database.fetch, fail)


# --- Executors -----------------------------------------------------------------------------------


class Closing:
    """An executor that only closes, and fails to if *error* is given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.closed = 0
        self._error = error

    async def close(self) -> None:
        self.closed += 1
        if self._error:
            raise self._error


async def test_executor_of_data_and_keys_is_closed_once() -> None:
    one: Any = Closing()
    executors = Executors(one, one)
    assert not executors.has_key_database
    await executors.close()
    assert one.closed == 1


async def test_executor_of_the_key_database_is_closed_even_if_closing_the_other_fails() -> None:
    data: Any = Closing(OSError("the data's"))
    keys: Any = Closing()
    executors = Executors(data, keys)
    assert executors.has_key_database
    with pytest.raises(OSError, match="the data's"):
        await executors.close()
    assert (data.closed, keys.closed) == (1, 1)
