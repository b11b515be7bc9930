"""Every command is started twice at once: both end, and none says that somebody has tampered.

How it works: at a chosen statement of one run, the other run of the same command begins and ends,
as that of another person would.  `COMMANDS` must have an entry for each command with a database.
"""

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from google.adk.artifacts import FileArtifactService
from google.adk.sessions import DatabaseSessionService
from google.genai import types

from adk_secure_sessions import AesGcmBackend, Audit, EncryptedArtifactService, SecureSessionError
from adk_secure_sessions.errors import TamperedError, WrongKeyError
from adk_secure_sessions.integrations import blob_maintenance, blob_rotation
from adk_secure_sessions.integrations.artifact_migration import migrate_artifacts
from adk_secure_sessions.integrations.artifact_sources import FileArtifacts
from adk_secure_sessions.maintenance import (
    Database,
    Erasure,
    Retirement,
    Separation,
    check,
    drop_index,
    erase_user,
    export_audit,
    fill_index,
    init,
    inspect_records,
    lookup,
    move_keys,
    purge_audit,
    purge_sessions,
    retire,
    rotate_data,
    rotate_master,
    rotate_root,
    separate,
    status,
    vacuum,
    verify,
    verify_audit,
)
from adk_secure_sessions.migration import (
    AdkTarget,
    compare,
    erase_source,
    export_lines,
    export_to_adk,
    migrate,
    open_source,
)
from tests.cli.support import commands
from tests.clocks import shifted
from tests.faults import Point, with_faults
from tests.key_database.support import KEY, OTHER, Pair, create, pair_in
from tests.maintenance.support import APP, event
from tests.migration.adk_sources import fill as fill_adk
from tests.migration.adk_sources import said

BOTH = [AesGcmBackend(OTHER), AesGcmBackend(KEY)]
Run = Callable[[Database, Path], Awaitable[object]]


class Command(NamedTuple):
    """A command, which `run` runs with a database, in a directory, after the commands *before*.

    *world* are the databases before the command, if only these are possible.  If it *only_reads*,
    two runs cannot meet.
    """

    run: Run
    before: tuple[Run, ...] = ()
    world: str | None = None
    only_reads: bool = False


def _from_source(function: Callable[..., Awaitable[object]]) -> Run:
    async def run(db: Database, directory: Path) -> object:
        async with await open_source(f"sqlite:///{directory}/adk.db") as source:
            return await function(source, db)

    return run


_migrate = _from_source(migrate)


async def _migrate_artifacts(db: Database, directory: Path) -> object:
    source = FileArtifacts(directory / "adk-artifacts")
    return await migrate_artifacts(source, db, directory / "blobs", "copy")


async def _export(db: Database, directory: Path) -> object:
    async with AdkTarget(f"sqlite:///{directory}/exported.db") as target:
        return await export_to_adk(db, target)


def _alone(function: Callable[[Database], Awaitable[object]]) -> Run:
    return lambda db, directory: function(db)


COMMANDS: dict[str, Command] = {
    "audit export": Command(
        lambda db, directory: export_audit(db, lambda line: None), only_reads=True
    ),
    "purge audit": Command(lambda db, directory: purge_audit(db, timedelta(days=2))),
    "verify --only trail": Command(_alone(verify_audit), only_reads=True),
    "purge blobs": Command(
        lambda db, directory: blob_maintenance.purge_blobs(db, directory / "blobs"),
        before=(lambda db, directory: erase_user(db, APP, "ada"),),
    ),
    "verify --store": Command(
        lambda db, directory: blob_maintenance.check_blobs(db, directory / "blobs"), only_reads=True
    ),
    "check": Command(_alone(check), only_reads=True),
    "erase-user": Command(lambda db, directory: erase_user(db, APP, "ada")),
    "export": Command(_export),
    "export --jsonl": Command(
        lambda db, directory: export_lines(db, lambda line: None), only_reads=True
    ),
    "index drop": Command(lambda db, directory: drop_index(db, APP, ["n"])),
    "index fill": Command(lambda db, directory: fill_index(db, APP, ["n"])),
    "init": Command(_alone(init), world="empty"),
    "debug inspect": Command(
        lambda db, directory: inspect_records(db, "secure_users"), only_reads=True
    ),
    "debug lookup": Command(lambda db, directory: lookup(db, APP, "ada"), only_reads=True),
    "migrate artifacts": Command(_migrate_artifacts),
    "migrate compare": Command(_from_source(compare), before=(_migrate,)),
    "migrate copy": Command(_migrate),
    "migrate erase-source": Command(_from_source(erase_source), before=(_migrate,)),
    "move-keys": Command(lambda db, directory: move_keys(db, "key-db"), world="one"),
    "move-keys --to db": Command(lambda db, directory: move_keys(db, "db"), world="pair"),
    "purge sessions": Command(lambda db, directory: purge_sessions(db, timedelta(0))),
    "retire": Command(_alone(retire), before=(_alone(rotate_master), _alone(rotate_data))),
    "rotate data": Command(_alone(rotate_data)),
    "rotate data --store": Command(
        lambda db, directory: blob_rotation.rotate_data_and_blobs(db, directory / "blobs")
    ),
    "rotate master": Command(_alone(rotate_master)),
    "rotate root": Command(_alone(rotate_root)),
    "separate": Command(_alone(separate)),
    "status": Command(_alone(status), only_reads=True),
    "vacuum": Command(_alone(vacuum)),
    "verify": Command(_alone(verify), only_reads=True),
}


# Each command runs on one database.  Those that change keys also run with a key database.
# By default, those that only read are left out.
CHANGE_KEYS = {"retire", "rotate data", "rotate master", "rotate root", "separate"}
CASES = [
    pytest.param((name, world), marks=pytest.mark.soak if command.only_reads else ())
    for name, command in COMMANDS.items()
    for world in ([command.world] if command.world else ["one", "pair"])
    if world != "pair" or name in CHANGE_KEYS or command.world
]


def database(case: tuple[str, str], pair: Pair) -> Database:
    name, world = case
    urls = pair.urls
    if world == "one" and name != "move-keys":
        del urls["key_db_url"]
    backends = BOTH if name == "rotate root" else BOTH[::-1]
    return Database(**urls, backend=backends[0], additional_backends=backends[1:])


async def fill(directory: Path) -> None:
    pair = pair_in(directory)
    options: dict[str, Any] = {"indexed_state_keys": ["n"], "audit": Audit("blind", table=True)}
    async with pair.service(**options) as service:
        artifacts = EncryptedArtifactService(service, directory / "blobs")
        part = types.Part.from_bytes(data=b"x" * 100_000, mime_type="image/png")
        for user in ("ada", "bob"):
            session = await create(service, user)
            for number in range(2):
                await service.append_event(session, event(number, n=number))
            await artifacts.save_artifact(
                app_name=APP, user_id=user, session_id="s", filename="f", artifact=part
            )
    plain = FileArtifactService(str(directory / "adk-artifacts"))
    for name in ("a", "b"):
        await plain.save_artifact(
            app_name=APP, user_id="carol", filename=f"user:{name}", artifact=part
        )
    adk = DatabaseSessionService(f"sqlite+aiosqlite:///{directory}/adk.db")
    for user in ("carol", "dave"):
        await fill_adk(adk, [said()], app_name=APP, user_id=user)
    await adk.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories, each with databases, an artifact store and a source of `migrate`, to copy."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("pair", "one", "empty")}
    with shifted(-10):  # `purge audit` deletes only chains that are two days old
        asyncio.run(fill(found["pair"]))
    shutil.copytree(found["pair"], found["one"], dirs_exist_ok=True)

    async def move() -> None:
        async with pair_in(found["one"]).maintained() as db:
            await move_keys(db, "db")

    asyncio.run(move())
    (found["one"] / "keys.db").unlink()
    return found


async def prepared(case: tuple[str, str], filled: dict[str, Path], directory: Path) -> Pair:
    name, world = case
    shutil.copytree(filled[world], directory)
    pair = pair_in(directory)
    for run in COMMANDS[name].before:
        async with database(case, pair) as db:
            await run(db, directory)
    return pair


class Steps:
    """Counts the moments at which no transaction is open, and runs *work* at one of them."""

    def __init__(self, at: int, work: Callable[[], Awaitable[object]]) -> None:
        self.number = 0
        self._at = at
        self._work = work

    def __call__(self) -> Awaitable[object] | None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return None  # in a transaction: on SQLite, the other run would wait for its end
        self.number += 1
        return self._work() if self.number == self._at else None


async def run_with_another(
    case: tuple[str, str], pair: Pair, directory: Path, at: int, other: str | None = None
) -> tuple[int, list[Any]]:
    """Run a command; before its step *at*, run it, or the command *other*, in another process.

    Return the number of steps, and what the two runs returned or raised: first of the one that
    ended first.
    """
    ended: list[Any] = []

    async def run(db: Database, name: str) -> None:
        try:
            async with db:
                ended.append(await COMMANDS[name].run(db, directory))
        except SecureSessionError as error:
            ended.append(error)

    steps = Steps(at, lambda: run(database(case, pair), other or case[0]))
    db, faults = with_faults(lambda: database(case, pair))
    for executor in set(faults):
        for point in (Point.READ, Point.WRITE, Point.RUN):
            executor.before(point, steps, nth=None)
    await run(db, case[0])
    return steps.number, ended


# The last two, if the keys were moved while the second run began.
SAYS_SO = re.compile(
    "another run of|by another rotation|has its keys in a key database|has keys of its own"
)


def succeeds(result: object) -> bool:
    """Whether a command with this result exits with 0."""
    wrong = ["bad", "left", "unchecked", "conflicts", "missing", "problems"]
    if isinstance(result, Retirement | Separation):
        wrong.append("kept")
    if isinstance(result, Erasure):
        wrong.remove("missing")  # the other run has erased the user
    right = ["is_complete", "cleared"]
    return not any(getattr(result, name, 0) for name in wrong) and all(
        getattr(result, name, True) for name in right
    )


async def start_twice(
    case: tuple[str, str], filled: dict[str, Path], directory: Path, at: int
) -> int:
    """Run a command twice at once, and then once more; return the number of steps."""
    pair = await prepared(case, filled, directory)
    steps, ended = await run_with_another(case, pair, directory, at)
    assert len(ended) == (2 if 0 < at <= steps else 1)
    assert succeeds(ended[0]), (at, ended[0])
    for late in ended[1:]:
        if isinstance(late, SecureSessionError):
            assert SAYS_SO.search(str(late)), (at, late)
            assert not isinstance(late, WrongKeyError | TamperedError)
        else:
            assert succeeds(late), (at, late)
    async with database(case, pair) as db:
        assert succeeds(await COMMANDS[case[0]].run(db, directory)), at
        assert succeeds(await verify(db)), at
    shutil.rmtree(directory)
    return steps


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES, ids=" on ".join)
async def test_command_that_is_started_twice_succeeds_or_says_so(
    case: tuple[str, str], every: bool, filled: dict[str, Path], tmp_path: Path
) -> None:
    steps = await start_twice(case, filled, tmp_path / "db", 8)
    for at in range(1, steps + 1):
        if every or at == steps < 8:
            await start_twice(case, filled, tmp_path / "db", at)


@pytest.mark.parametrize("world", ["one", "pair"])
async def test_database_that_is_separated_during_a_rotation_can_be_opened(
    world: str, filled: dict[str, Path], tmp_path: Path
) -> None:
    """The rotation must not add a master key that is bound to the id before the separation."""
    case = ("rotate master", world)
    for at in (1, 4, 16):
        pair = await prepared(case, filled, tmp_path / "db")
        _, ended = await run_with_another(case, pair, tmp_path / "db", at, "separate")
        assert [succeeds(one) for one in ended] == [True, True], (at, ended)
        async with database(case, pair) as db:
            assert succeeds(await verify(db)), at
            assert succeeds(await check(db)), at
        shutil.rmtree(tmp_path / "db")


def test_each_command_with_a_database_is_started_twice() -> None:
    without_database = {"keygen", "adk doctor"}
    assert {name.partition(" --")[0] for name in COMMANDS} == {*commands()} - without_database
