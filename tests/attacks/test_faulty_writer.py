"""Records that are authentic, and hold what no release writes: they are rejected by name."""

import pytest

from adk_secure_sessions import AesGcmBackend, DecryptionError, EncryptedSessionService, Reason
from tests.attacks.faulty import (
    KEY,
    MARK,
    OTHER,
    WHO,
    Edit,
    assert_names,
    assert_verify_names,
    event,
    url,
    write,
)

__all__ = ["url"]

MALFORMED = {
    "empty": b"",
    "no JSON": MARK.encode(),
    "a list": f'["{MARK}"]'.encode(),
    "UTF-16": f'{{"k":"{MARK}"}}'.encode("utf-16"),
    "not UTF-8": f'{{"k":"{MARK}'.encode() + b'\xff"}',
    "too deep": b'{"k":' * 930 + b"1" + b"}" * 930,
    "too many digits": b'{"k":' + b"7" * 5000 + b"}",
}


def replacing(instead: bytes) -> Edit:
    """Put *instead* in the place of the JSON."""

    def edit(plaintext: bytes) -> bytes:
        if b'"author"' in plaintext:  # after the flags and two links
            return plaintext[:33] + b"\x051.2.3" + instead
        return plaintext[: plaintext.index(b'{"k"')] + instead

    return edit


@pytest.mark.in_turn("where", "instead")
@pytest.mark.parametrize("instead", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("where", ["app", "user", "session", "snapshot"])
async def test_malformed_state_is_rejected_and_may_be_left_out_of_listings(
    url: str, where: str, instead: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await write(url, where, replacing(instead))
    user = {name: WHO[name] for name in ("app_name", "user_id")}
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        for call in (
            lambda: service.get_session(**WHO),
            lambda: service.list_sessions(app_name="app"),
            lambda: service.list_sessions(**user),
        ):
            with pytest.raises(DecryptionError) as info:
                await call()
            assert_names(info.value, where)
        assert where == "app" or await service.get_session(**OTHER)
    async with EncryptedSessionService(
        url, AesGcmBackend(KEY), skip_unreadable_sessions=True
    ) as service:
        everybody = (await service.list_sessions(app_name="app")).sessions
        assert [one.user_id for one in everybody] == ([] if where == "app" else ["other"])
        assert (await service.list_sessions(**user)).sessions == []
    assert "left out of a listing" in caplog.text
    assert "7Qx" not in caplog.text
    await assert_verify_names(url, where)


@pytest.mark.parametrize("instead", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_event_is_rejected(url: str, instead: bytes) -> None:
    await write(url, "event", replacing(instead))
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(DecryptionError, match="secure_events row") as info:
            await service.get_session(**WHO)
        assert_names(info.value, "event")
        assert len((await service.list_sessions(app_name="app")).sessions) == 2
    await assert_verify_names(url, "event")


@pytest.mark.parametrize(
    ("where", "key"), [("app", "app:new"), ("user", "user:new"), ("session", "new")]
)
async def test_malformed_state_is_never_overwritten(url: str, where: str, key: str) -> None:
    session = await write(url, where, replacing(MALFORMED["no JSON"]))
    async with EncryptedSessionService(url, AesGcmBackend(KEY)) as service:
        with pytest.raises(DecryptionError) as info:
            await service.append_event(session, event("fine", **{key: 1}))
        assert info.value.reason is Reason.MALFORMED
        if where != "session":
            with pytest.raises(DecryptionError):
                await service.create_session(app_name="app", user_id="user", state={key: 1})
        with pytest.raises(DecryptionError):
            await service.get_session(**WHO)
