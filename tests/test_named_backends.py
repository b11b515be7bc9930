"""Names and key specs: which backends they give, and which of them writes."""

import base64

import pytest

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptionBackend,
    FernetBackend,
    NoOpBackend,
    StaticKey,
)
from adk_secure_sessions.backends.registry import DEFAULT, NAMES, NO_OP, backends_for

KEYS = {"NAMED_A": bytes(range(32)), "NAMED_B": bytes(range(32, 64))}
A, B = (f"env:{name}" for name in KEYS)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, base64.b64encode(key).decode())


def made(names: list[str], specs: list[str]) -> list[tuple[type, str]]:
    """The class of each backend and the spec of its root key; first the backend that writes."""
    specs_by_id = {StaticKey(key).key_id: f"env:{name}" for name, key in KEYS.items()}

    def described(backend: EncryptionBackend) -> tuple[type, str]:
        return type(backend), specs_by_id.get(backend.root_key.key_id, "")

    writer, others = backends_for(names, specs)
    return [described(writer), *map(described, others)]


def test_names_are_those_of_the_command_line() -> None:
    assert NAMES == ("aesgcm", "fernet", "no-op")
    assert (DEFAULT, NO_OP) == ("aesgcm", "no-op")


@pytest.mark.parametrize(("name", "kind"), [("aesgcm", AesGcmBackend), ("fernet", FernetBackend)])
def test_name_and_spec_give_a_backend(name: str, kind: type) -> None:
    assert made([name], [A]) == [(kind, A)]


def test_each_name_has_each_key_and_the_first_of_both_writes() -> None:
    assert made(["fernet", "aesgcm"], [B, A]) == [
        (FernetBackend, B),
        (FernetBackend, A),
        (AesGcmBackend, B),
        (AesGcmBackend, A),
    ]


def test_repeated_name_counts_once() -> None:
    assert made(["fernet", "aesgcm", "fernet"], [A]) == [(FernetBackend, A), (AesGcmBackend, A)]


def test_no_op_needs_no_key_and_does_not_warn() -> None:
    assert made(["no-op"], []) == [(NoOpBackend, "")]


def test_no_op_alone_can_unwrap_the_master_keys_of_each_root_key() -> None:
    assert made(["no-op", "no-op"], [A, B]) == [
        (NoOpBackend, ""),
        (AesGcmBackend, A),
        (AesGcmBackend, B),
    ]


def test_no_op_beside_another_name_adds_no_other_backend() -> None:
    assert made(["no-op", "fernet"], [A]) == [(NoOpBackend, ""), (FernetBackend, A)]
    assert made(["fernet", "no-op"], [A]) == [(FernetBackend, A), (NoOpBackend, "")]


def test_key_in_place_of_a_spec_is_rejected_and_not_repeated() -> None:
    key = base64.b64encode(KEYS["NAMED_A"]).decode()
    with pytest.raises(ConfigurationError, match="give a key spec such as env:NAME") as info:
        backends_for(["aesgcm"], [A, key])
    assert key[:8] not in str(info.value)
