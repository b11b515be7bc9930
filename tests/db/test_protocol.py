"""Running the steps of a transaction one statement at a time: what no server of the tests does."""

from collections.abc import Sequence
from functools import partial
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
    Steps,
    T,
    run_changes,
    run_steps,
    with_claims,
)

FIRST, SECOND, THIRD = (sa.text(name) for name in ("first", "second", "third"))


FIRST_CLAIMED = FIRST.execution_options(claim=lambda parameters: [Change(THIRD, parameters)])


class Database:
    """Answers how many rows each change *matches*, and records the statements."""

    def __init__(self, **matches: int) -> None:
        self.matches = matches
        self.statements: list[str] = []

    def run(self, steps: Steps[T]) -> T:
        return run_steps(steps, self.fetch, partial(run_changes, self.make))

    def fetch(self, query: sa.Executable, parameters: Parameters) -> Sequence[Any]:
        self.statements.append(f"read {query}")
        return []

    def make(self, change: Change) -> int:
        self.statements.append(str(change.statement))
        return self.matches.get(str(change.statement), 1)


def apply_all(*changes: Change) -> Steps[bool]:
    made: bool = yield Apply(changes)
    return made


@pytest.mark.parametrize("matched", [0, 2])
def test_later_change_or_claim_that_matches_not_one_row_is_a_conflict(matched: int) -> None:
    database = Database(second=matched, third=matched)
    later = apply_all(Change(FIRST, {}), Change(SECOND, {}), Change(THIRD, {}))
    claim = with_claims(apply_all(Change(FIRST_CLAIMED, {}), Change(SECOND, {})))
    for steps in (later, claim):
        with pytest.raises(Conflict):
            database.run(steps)
    assert database.statements == ["first", "second", "first", "third"]


def test_first_change_that_matches_two_rows_is_a_conflict() -> None:
    with pytest.raises(Conflict):
        Database(first=2).run(apply_all(Change(FIRST, {})))


@pytest.mark.parametrize("is_cluster", [True, False])
@pytest.mark.parametrize("matched", [1, 0])
def test_claim_is_made_on_a_cluster_only_and_after_its_statement(
    is_cluster: bool, matched: int
) -> None:
    database = Database(first=matched)
    steps = apply_all(Change(FIRST_CLAIMED, {}))
    assert database.run(with_claims(steps) if is_cluster else steps) is bool(matched)
    assert database.statements == (["first", "third"] if is_cluster and matched else ["first"])


def test_claim_of_a_query_is_made_after_it() -> None:
    def steps() -> Steps[object]:
        return (yield Read(FIRST_CLAIMED, {}))

    database = Database()
    assert database.run(with_claims(steps())) == []
    assert database.statements == ["read first", "third"]


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
