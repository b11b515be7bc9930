"""Code as a user would write it, for type checkers: `make types` checks it, nothing runs it."""

import os
from pathlib import Path
from typing import Any, assert_type

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from google.adk.agents import LlmAgent
from google.adk.events import Event
from google.adk.runners import Runner
from google.adk.sessions import BaseSessionService, Session
from google.adk.sessions.base_session_service import ListSessionsResponse
from sqlalchemy.ext.asyncio import create_async_engine

from adk_secure_sessions import (
    AesGcmBackend,
    Audit,
    AwsKmsKey,
    Caches,
    Cipher,
    ConfigurationError,
    DecryptionError,
    EncryptedSessionService,
    EncryptionBackend,
    EnvironmentKey,
    FernetBackend,
    FileKey,
    GcpKmsKey,
    KeyProvider,
    KeyServiceError,
    NoOpBackend,
    Packing,
    PassphraseKey,
    Pkcs11Key,
    PlaintextRefusedError,
    SecureSessionError,
    StaticKey,
    TamperedError,
    UnknownKeyError,
    VaultKey,
    WrongKeyError,
    generate_key,
    key_provider,
)
from adk_secure_sessions.testing import check_key_provider

URL = "sqlite+aiosqlite:///sessions.db"


def keys() -> list[KeyProvider]:
    text = assert_type(generate_key(), str)
    return [
        StaticKey(os.urandom(32)),
        StaticKey(text),
        EnvironmentKey("SESSIONS_KEY"),
        FileKey("/run/secrets/sessions-key"),
        FileKey(Path("sessions.key")),
        PassphraseKey("correct horse battery staple"),
        PassphraseKey("correct horse battery staple", key_id="spring"),
        assert_type(key_provider("passphrase-env:SESSIONS_PASSPHRASE"), KeyProvider),
    ]


def backends() -> list[EncryptionBackend]:
    return [
        AesGcmBackend(os.urandom(32)),
        AesGcmBackend(generate_key()),
        AesGcmBackend("env:SESSIONS_KEY"),
        AesGcmBackend(EnvironmentKey("SESSIONS_KEY")),
        FernetBackend("file:/run/secrets/sessions-key"),
        FernetBackend(FileKey("sessions.key")),
        NoOpBackend(),
        ChaChaBackend(StaticKey(generate_key())),
    ]


# A backend and a key provider of one's own: no base class, only the right shape.


class ChaChaCipher:
    def __init__(self, key: bytes) -> None:
        self._aead = ChaCha20Poly1305(key)

    def encrypt(self, plaintext: bytes, associated_data: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._aead.encrypt(nonce, plaintext, associated_data)

    def decrypt(self, sealed: bytes, associated_data: bytes) -> bytes:
        return self._aead.decrypt(sealed[:12], sealed[12:], associated_data)


class ChaChaBackend:
    backend_id = 0x80
    name = "chacha20-poly1305"

    def __init__(self, root_key: KeyProvider) -> None:
        self.root_key = root_key

    def new_key(self) -> bytes:
        return ChaCha20Poly1305.generate_key()

    def cipher(self, key: bytes) -> Cipher:
        return ChaChaCipher(key)


class OwnKey:
    key_id = "ours:sessions"

    async def wrap(self, key: bytes, associated_data: bytes) -> bytes:
        raise KeyServiceError("the vault is sealed", retryable=True)

    async def unwrap(self, wrapped: bytes, associated_data: bytes) -> bytes:
        raise KeyServiceError("the vault is sealed", retryable=True)


async def key_services() -> None:
    AesGcmBackend(AwsKmsKey("alias/clinic", region="eu-central-1", timeout=2.0, attempts=2))
    AesGcmBackend(GcpKmsKey("projects/p/locations/l/keyRings/r/cryptoKeys/k"))
    AesGcmBackend(Pkcs11Key("clinic/sessions", module="/usr/lib/module.so", pin_file="pin"))
    AesGcmBackend(VaultKey("transit/clinic", token_file=Path("token"), namespace="team"))
    await check_key_provider(OwnKey, other=lambda: StaticKey(bytes(32)), hidden=["secret"])


async def constructors(key: bytes) -> None:
    EncryptedSessionService(URL, AesGcmBackend(key))
    EncryptedSessionService(db_url=URL, backend=AesGcmBackend(OwnKey()), pool_size=5, echo=False)
    EncryptedSessionService(
        URL,
        AesGcmBackend(key),
        additional_backends=[FernetBackend(key), ChaChaBackend(StaticKey(key))],
        skip_unreadable_sessions=True,
        cache=Caches(sessions=100, seconds=60),
        audit=Audit("readable", table=True),
        packing=Packing(padding="padme"),
    )
    engine = create_async_engine(URL)
    service = EncryptedSessionService(db_engine=engine, backend=AesGcmBackend(key))
    await service.prepare_tables()
    await service.flush()
    await service.close()


async def sessions(key: str) -> None:
    async with EncryptedSessionService(URL, AesGcmBackend(key)) as service:
        assert_type(service, EncryptedSessionService)
        runner(service)
        session = await service.create_session(
            app_name="clinic", user_id="ada", state={"user:allergies": ["penicillin"]}
        )
        assert_type(session, Session)
        event = await service.append_event(session, Event(author="user", invocation_id="1"))
        assert_type(event, Event)
        found = await service.get_session(app_name="clinic", user_id="ada", session_id=session.id)
        assert_type(found, Session | None)
        listed = await service.list_sessions(app_name="clinic")
        assert_type(listed, ListSessionsResponse)
        state = await service.get_user_state(app_name="clinic", user_id="ada")
        assert_type(state, dict[str, Any])
        await service.delete_session(app_name="clinic", user_id="ada", session_id=session.id)


def runner(service: BaseSessionService) -> Runner:
    agent = LlmAgent(name="receptionist", model="gemini-2.5-flash")
    return Runner(app_name="clinic", agent=agent, session_service=service)


async def errors(service: EncryptedSessionService) -> str:
    try:
        await service.prepare_tables()
    except WrongKeyError:
        return "another key, please"
    except KeyServiceError as error:
        return "try again" if assert_type(error.retryable, bool) else "ask an administrator"
    except (TamperedError, PlaintextRefusedError, UnknownKeyError) as error:
        unreadable: DecryptionError = error
        return str(unreadable)
    except ConfigurationError as error:
        refused: ValueError = error
        return str(refused)
    except SecureSessionError as error:
        return str(error)
    return "ready"
