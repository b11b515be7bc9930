"""A page of a listing rejects what the whole listing rejects."""

import pytest

from adk_secure_sessions import DecryptionError, EncryptedSessionService, TamperedError
from tests.attacks.databases import also_on
from tests.attacks.support import Database, OlderCopy
from tests.attacks.world import VISIT

pytestmark = also_on("postgresql")
ATTACKS = [
    "UPDATE secure_sessions SET state = substr(state, 1, length(state) - 1) WHERE id = :visit",
    "UPDATE secure_sessions SET revision = revision - 1 WHERE id = :visit",
    "UPDATE secure_sessions SET expires_at = 5 WHERE id = :visit",
    "UPDATE secure_sessions SET base_revision = -2 WHERE id = :visit",
    "UPDATE secure_bases SET revision = revision - 1 WHERE session_row = :archive",
    "DELETE FROM secure_bases WHERE session_row = :archive",
    "DELETE FROM secure_events WHERE session_row = :visit",
    "DELETE FROM secure_witnesses WHERE number = :visit",
    "UPDATE secure_witnesses SET seal = X'00' WHERE number = :visit",
    "UPDATE secure_users SET version = version + 1 WHERE id = :alice",
    "UPDATE secure_apps SET version = version + 1 WHERE id = :clinic",
    "UPDATE secure_sessions SET user_row = :alice WHERE user_row <> :alice",
]
NOT_READ = ATTACKS[4:6]  # a page without states does not read snapshots


async def read_pages(
    service: EncryptedSessionService, user_id: str | None, *, include_state: bool
) -> None:
    for order in ("oldest", "newest"):
        after = None
        while True:
            page = await service.list_sessions_page(
                VISIT.app_name,
                user_id,
                limit=1,
                after=after,
                order=order,
                include_state=include_state,
            )
            after = page.next
            if after is None:
                break


@pytest.mark.in_turn("include_state", "attack")
@pytest.mark.parametrize("include_state", [True, False], ids=["states", "no states"])
@pytest.mark.parametrize("attack", ATTACKS)
async def test_page_is_rejected_like_the_whole_listing(
    aes_db: Database, attack: str, include_state: bool
) -> None:
    aes_db.run(attack)
    async with aes_db.service() as service:
        for user_id in (VISIT.user_id, None):
            with pytest.raises(DecryptionError):
                await service.list_sessions(app_name=VISIT.app_name, user_id=user_id)
    async with aes_db.service() as service:
        for user_id in (VISIT.user_id, None):
            if attack in NOT_READ and not include_state:
                await read_pages(service, user_id, include_state=False)
                continue
            with pytest.raises(DecryptionError):
                await read_pages(service, user_id, include_state=include_state)


async def test_replayed_session_is_rejected(db: Database, older: OlderCopy) -> None:
    older.replay_row("secure_sessions", "id = :visit")
    async with db.service() as service:
        with pytest.raises(TamperedError):
            await read_pages(service, VISIT.user_id, include_state=True)


async def test_unreadable_session_can_be_left_out_of_a_page(aes_db: Database) -> None:
    aes_db.run(ATTACKS[0])
    async with aes_db.service(skip_unreadable_sessions=True) as service:
        for user_id in (VISIT.user_id, None):
            listed = await service.list_sessions(app_name=VISIT.app_name, user_id=user_id)
            page = await service.list_sessions_page(VISIT.app_name, user_id, limit=100)
            assert {one.id for one in page.sessions} == {one.id for one in listed.sessions}
            assert VISIT.session_id not in {
                one.id for one in page.sessions if one.user_id == VISIT.user_id
            }
