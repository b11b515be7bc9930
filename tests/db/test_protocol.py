"""Running the steps of a transaction one statement at a time: what no server of the tests does."""

from collections.abc import Callable, Sequence
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
    Steps,
    run_changes,
    run_steps,
)

FIRST, SECOND, THIRD = (sa.text(name) for name in ("first", "second", "third"))


class Database:
    """Answers how many rows each change *matches*, and records the statements."""

    def __init__(self, **matches: int) -> None:
        self.matches = matches
        self.statements: list[str] = []

    def fetch(self, query: sa.Executable, parameters: Parameters) -> Sequence[Any]:
        raise AssertionError

    def applying(self, is_cluster: bool) -> Callable[[Sequence[Change]], bool]:
        return partial(run_changes, self.run, is_cluster=is_cluster)

    def run(self, change: Change) -> int:
        self.statements.append(str(change.statement))
        return self.matches.get(str(change.statement), 1)


def apply_all(*changes: Change) -> Steps[bool]:
    made: bool = yield Apply(changes)
    return made


@pytest.mark.parametrize("matched", [0, 2])
def test_later_change_or_claim_that_matches_not_one_row_is_a_conflict(matched: int) -> None:
    database = Database(second=matched, third=matched)
    for is_cluster, later in ((False, Change(SECOND, {})), (True, ON_CLUSTER)):
        steps = apply_all(Change(FIRST, {}), later, Change(THIRD, {}))
        with pytest.raises(Conflict):
            run_steps(steps, database.fetch, database.applying(is_cluster))
    assert database.statements == ["first", "second", "first", "third"]


def test_first_change_that_matches_two_rows_is_a_conflict() -> None:
    database = Database(first=2)
    with pytest.raises(Conflict):
        run_steps(apply_all(Change(FIRST, {})), database.fetch, database.applying(False))


ON_CLUSTER = Change(THIRD, {}, only_on_cluster=True)


@pytest.mark.parametrize("is_cluster", [True, False])
@pytest.mark.parametrize(("first", "applied"), [(1, True), (0, False)])
def test_change_for_clusters_is_made_only_there_and_does_not_count_as_the_first(
    is_cluster: bool, first: int, applied: bool
) -> None:
    database = Database(first=first)
    steps = apply_all(ON_CLUSTER, Change(FIRST, {}))
    assert run_steps(steps, database.fetch, database.applying(is_cluster)) is applied
    assert database.statements == (["third", "first"] if is_cluster else ["first"])


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
