"""`check` accepts what a service accepts that starts, and raises the error that it would raise."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from adk_secure_sessions import SecureSessionError
from adk_secure_sessions.keys.keyring import MAX_MASTERS
from adk_secure_sessions.maintenance import Check, Database, check, move_keys, separate, status
from tests.faults import Point, with_faults
from tests.key_database.support import KEY, OTHER, Pair, create, pair_in
from tests.maintenance.support import Killed, query, run_sql

_META = "SELECT name || ' ' || value FROM secure_meta"
# While `separate` stores "separating" in the key database, the data database has the old id.
IN_SEPARATION = ["separating", "rotation.master", "rotation.data"]


@pytest.fixture
async def pair(tmp_path: Path) -> Pair:
    """A database with a session, and its key database."""
    found = pair_in(tmp_path)
    async with found.service() as service:
        await create(service)
    return found


async def interrupt(pair: Pair, command: Callable[[Database], Awaitable[Any]], mark: str) -> None:
    """Kill *command* before it next uses the data database after it has stored *mark* anywhere."""

    def kill() -> None:
        values = [value for place in pair for (value,) in query(place, _META)]
        if any(mark in value for value in values):
            raise Killed

    db, faults = with_faults(pair.maintained)
    faults.data.before(Point.RUN, kill, nth=None)
    async with db:
        with pytest.raises(Killed):
            await command(db)


async def errors(pair: Pair, key: bytes = KEY) -> tuple[str, str]:
    """The errors of a service that starts, and of `check`; "" if there is none."""
    found = []
    async with pair.service(key) as service, pair.maintained(key) as db:
        for work in (service.prepare_tables(), check(db)):
            try:
                await work
                found.append("")
            except SecureSessionError as error:
                found.append(f"{type(error).__name__}: {error}")
    return found[0], found[1]


COPIED_KEY = (
    "INSERT INTO secure_keyring SELECT id + :n, purpose, root_key_id, created_at, wrapped "
    "FROM secure_keyring WHERE purpose = 'data' LIMIT 1"
)
BROKEN = {
    "a wrapped key": "UPDATE secure_keyring SET wrapped = x'00'",
    "no index master": "DELETE FROM secure_keyring WHERE purpose = 'index'",
    "another format": "UPDATE secure_meta SET value = '99' WHERE name = 'format'",
    "no table": "DROP TABLE secure_data_keys",
    "another table": "ALTER TABLE secure_data_keys RENAME COLUMN owner TO master",
    "an unknown feature": "UPDATE secure_meta SET value = replace(value, '- ', 'x ')",
    "another list of features": "UPDATE secure_meta SET value = replace(value, '- ', 'expiry ')",
    "no table of a feature": "UPDATE secure_meta SET value = replace(value, '- ', 'audit ')",
    "no list of features": "DELETE FROM secure_meta WHERE name = 'features'",
    "another id": (
        "UPDATE secure_meta SET value = "
        "CASE substr(value, 1, 1) WHEN '0' THEN '1' ELSE '0' END || substr(value, 2) "
        "WHERE name = 'database_id'"
    ),
    "another mark": "UPDATE secure_meta SET value = 'all' WHERE name = 'holds'",
    "plaintext master": "UPDATE secure_keyring SET root_key_id = 'none'",
}


async def test_check_accepts_what_a_service_accepts(pair: Pair) -> None:
    assert await errors(pair) == ("", "")


@pytest.mark.parametrize("name", BROKEN)
async def test_check_raises_the_error_of_a_service(name: str, pair: Pair) -> None:
    run_sql(pair.keys, BROKEN[name])
    of_service, of_check = await errors(pair)
    assert of_service
    assert of_service == of_check


async def test_check_rejects_a_wrong_root_key_as_a_service_does(pair: Pair) -> None:
    of_service, of_check = await errors(pair, OTHER)
    assert of_service.startswith("WrongKeyError")
    assert of_service == of_check


async def test_check_rejects_too_many_master_keys_as_a_service_does(pair: Pair) -> None:
    for number in range(MAX_MASTERS):
        run_sql(pair.keys, COPIED_KEY, n=number + 1)
    of_service, of_check = await errors(pair)
    assert of_service
    assert of_service == of_check


@pytest.mark.parametrize("mark", [*IN_SEPARATION, "moving"])
async def test_check_rejects_what_an_interrupted_command_left(mark: str, pair: Pair) -> None:
    moves = mark == "moving"
    await interrupt(pair, (lambda db: move_keys(db, "db")) if moves else separate, mark)
    of_service, of_check = await errors(pair)
    assert f"run `adk-secure-sessions {'move-keys' if moves else 'separate'}` again" in of_service
    assert of_service == of_check


async def test_check_tells_which_master_key_wraps_new_data_keys(pair: Pair) -> None:
    async with pair.maintained() as db:
        found = await check(db)
        (data_master,) = [one for one in (await status(db)).master_keys if one.purpose == "data"]
    root = data_master.root_key_id
    assert found == Check("2", root, 2, data_master.id, True, False)
