"""Root keys in the process: their forms, what they wrap, and that no text shows them."""

import asyncio
import base64
import os
import re
import signal
import struct
import threading
import time
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id
from hypothesis import given
from hypothesis import strategies as st

from adk_secure_sessions import (
    AesGcmBackend,
    ConfigurationError,
    EncryptedSessionService,
    EnvironmentKey,
    FileKey,
    PassphraseKey,
    StaticKey,
    TamperedError,
    generate_key,
    key_provider,
)
from adk_secure_sessions.crypto.aead import Aes256Gcm
from adk_secure_sessions.errors import Reason
from adk_secure_sessions.keys import passphrase
from adk_secure_sessions.keys.providers import parse_key, read_private_file
from adk_secure_sessions.keys.specs import root_key

KEY = bytes(range(200, 232))  # its base64 has characters that differ between the two alphabets
TEXT = base64.urlsafe_b64encode(KEY).decode()
MASTER = bytes(range(32))
WORDS = "correct horse battery staple"

posix = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passphrases at the lowest cost.

    Constants, not arguments: nobody is to choose less than RFC 9106 recommends, and the real cost
    is 0.15 s a key.
    """
    for name, value in {"_ITERATIONS": 1, "_LANES": 1, "_MEMORY_KIB": 8}.items():
        monkeypatch.setattr(passphrase, name, value)


# --- forms of a key ------------------------------------------------------------------------------

FORMS: dict[str, Any] = {
    "bytes": KEY,
    "bytearray": bytearray(KEY),
    "URL-safe text": TEXT,
    "standard text": base64.b64encode(KEY).decode(),
    "text without padding": TEXT.rstrip("="),
    "text with too much padding": TEXT + "=",
    "text with a line break": TEXT + "\n",
    "text in spaces": f"  {TEXT}\r\n",
    "text as bytes": TEXT.encode(),
    "text as bytes with a line break": TEXT.encode() + b"\n",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_a_key_gives_its_bytes(form: bytes | str) -> None:
    assert parse_key(form) == KEY


@given(st.binary(min_size=32, max_size=32))
def test_any_32_bytes_are_a_key_in_either_alphabet(key: bytes) -> None:
    assert parse_key(key) == key
    assert parse_key(base64.b64encode(key).decode()) == key
    assert parse_key(base64.urlsafe_b64encode(key).rstrip(b"=")) == key


# Parts of these would be recognised in a message.
REFUSED: dict[str, Any] = {
    "empty": "",
    "no bytes": b"",
    "31 bytes": b"needle" * 5 + b"x",
    "33 bytes": b"needle" * 5 + b"xyz",
    "text of 16 bytes": base64.b64encode(b"needle7890123456").decode(),
    "text of 33 bytes": base64.b64encode(b"needle" * 5 + b"xyz").decode(),
    "a password": "needle needle",
    "not base64": "needle!" * 6,
    "text that is not ASCII": "needle-ü" * 5,
    "text with a line break inside": TEXT[:20] + "\n" + TEXT[20:],
    "text in five groups": " ".join(TEXT[start : start + 10] for start in range(0, 44, 10)),
    "hexadecimal": KEY.hex(),
    "None": None,
    "a number": 7,
    "a list": ["needle"],
}


@pytest.mark.parametrize("key", REFUSED.values(), ids=REFUSED)
def test_value_that_is_no_key_is_rejected_without_repeating_it(key: Any) -> None:
    with pytest.raises(ConfigurationError, match="key") as info:
        parse_key(key)
    shown = str(info.value)
    assert "needle" not in shown
    assert TEXT[:8] not in shown
    assert KEY.hex()[:8] not in shown
    assert base64.b64encode(b"needle").decode() not in shown
    assert info.value.__context__ is None


def test_wrong_length_is_named() -> None:
    with pytest.raises(ConfigurationError, match="must be 32 bytes, got 16"):
        parse_key(base64.b64encode(bytes(16)).decode())


def test_generated_keys_are_valid_and_never_the_same() -> None:
    keys = {generate_key() for _ in range(100)}
    assert len({parse_key(key) for key in keys}) == 100


# --- static keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [b"", b"\x02" + bytes(60)], ids=["empty", "by a passphrase"])
async def test_key_that_no_static_key_has_wrapped_is_malformed(wrapped: bytes) -> None:
    with pytest.raises(TamperedError, match="not a key wrapped by a static root key") as rejected:
        await StaticKey(KEY).unwrap(wrapped, b"context")
    assert rejected.value.reason == Reason.MALFORMED


def test_key_id_is_stable_and_holds_nothing_of_the_key() -> None:
    assert StaticKey(KEY).key_id == StaticKey(TEXT).key_id
    assert StaticKey(KEY).key_id != StaticKey(MASTER).key_id
    assert StaticKey(KEY).key_id.removeprefix("key:") not in KEY.hex()


def test_providers_of_one_key_are_equal() -> None:
    assert StaticKey(KEY) == StaticKey(TEXT)
    assert hash(StaticKey(KEY)) == hash(StaticKey(TEXT))
    assert StaticKey(KEY) != StaticKey(MASTER)
    assert StaticKey(KEY) != KEY


# --- names of root keys --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key_id", ["k", "k" * 255, "Schlüssel 1", "nones", "NONE", "key", "Key:1", "a key:"]
)
def test_root_key_may_have_any_name_that_is_not_reserved(key_id: str) -> None:
    assert PassphraseKey(WORDS, key_id=key_id).key_id == key_id


@pytest.mark.parametrize("key_id", ["", "k" * 256, "a\nb", "\x00", None, 7, b"key", ["key"]])
def test_name_that_is_not_1_to_255_printable_characters_is_rejected(key_id: Any) -> None:
    with pytest.raises(ConfigurationError, match="a key_id has 1 to 255 printable characters"):
        PassphraseKey(WORDS, key_id=key_id)


@pytest.mark.parametrize("key_id", ["none", "key:", StaticKey(KEY).key_id])
def test_name_of_another_kind_of_root_key_is_rejected(key_id: str) -> None:
    message = (
        f"the key_id {key_id!r} is reserved for another kind of root key: it must not be 'none' "
        "and must not begin with 'key:'"
    )
    with pytest.raises(ConfigurationError, match=message):
        PassphraseKey(WORDS, key_id=key_id)


# --- environment and files -----------------------------------------------------------------------


def test_key_in_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", TEXT)
    key = EnvironmentKey("A_KEY")
    monkeypatch.delenv("A_KEY")
    assert key == StaticKey(KEY)


@pytest.mark.parametrize("value", [None, ""])
def test_variable_that_is_unset_or_empty_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("A_KEY", value)
    with pytest.raises(ConfigurationError, match="'A_KEY' is not set or is empty"):
        EnvironmentKey("A_KEY")


def test_wrong_key_in_the_environment_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "needle needle")
    with pytest.raises(ConfigurationError) as info:
        EnvironmentKey("A_KEY")
    assert "needle" not in str(info.value)
    monkeypatch.setenv("A_KEY", "needle\udcff")  # what Python makes of the byte FF
    with pytest.raises(ConfigurationError, match="'A_KEY' is not text in UTF-8") as info:
        EnvironmentKey("A_KEY")
    assert "needle" not in repr(info.value)
    with pytest.raises(ConfigurationError, match=r"^the name of an environment variable is not "):
        EnvironmentKey("needle\udcff")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "root.key"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("content", [KEY, TEXT.encode(), TEXT.encode() + b"\r\n"])
def test_key_file_is_read_in_every_form(key_file: Path, content: bytes) -> None:
    key_file.write_bytes(content)
    assert FileKey(key_file) == FileKey(str(key_file)) == StaticKey(KEY)


@posix
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_key_file_that_only_its_owner_may_read_is_accepted(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    assert FileKey(key_file) == StaticKey(KEY)


@posix
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o660, 0o666, 0o777])
def test_key_file_that_others_may_use_is_rejected(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        FileKey(key_file)


@posix
def test_link_to_a_private_key_file_is_followed(key_file: Path) -> None:
    link = key_file.with_name("link")
    link.symlink_to(key_file)
    assert FileKey(link) == StaticKey(KEY)
    key_file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        FileKey(link)


def test_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing\.key.*No such file"):
        FileKey(tmp_path / "missing.key")


def test_directory_in_place_of_a_key_file_is_rejected_by_its_name(tmp_path: Path) -> None:
    name = re.escape(repr(str(tmp_path)))
    with pytest.raises(ConfigurationError, match=f"the key file {name} is not a regular file"):
        FileKey(tmp_path)


def test_only_the_first_4096_bytes_of_a_key_file_are_read(key_file: Path) -> None:
    content = bytes(range(256)) * 20
    key_file.write_bytes(content)
    assert read_private_file(key_file) == content[:4096]


def test_key_file_is_opened_as_binary_on_windows(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a text file of Windows, 0x1a is the end, and b"\\r\\n" is read as b"\\n"."""
    key = b"\r\n\x1a" + bytes(range(29))
    key_file.write_bytes(key)
    open_file, binary, opened_with = os.open, 0x8000, []

    def open_and_record(path: Path, flags: int) -> int:
        opened_with.append(flags)
        return open_file(path, flags & ~binary)

    monkeypatch.setattr(os, "O_BINARY", binary, raising=False)
    monkeypatch.setattr(os, "open", open_and_record)
    assert FileKey(key_file) == StaticKey(key)
    assert opened_with[0] & binary


def test_open_key_file_is_not_inherited_by_child_processes(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited: list[bool] = []
    read_file = os.read

    def read(file: int, length: int) -> bytes:
        inherited.append(os.get_inheritable(file))
        return read_file(file, length)

    monkeypatch.setattr(os, "read", read)
    FileKey(key_file)
    assert inherited == [False]


@posix
@pytest.mark.parametrize("use", [FileKey, lambda path: key_provider(f"file:{path}")])
def test_fifo_in_place_of_a_key_file_is_rejected_at_once(
    tmp_path: Path, use: Callable[[Path], object]
) -> None:
    """Opening it would wait until something writes to it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)

    def waited(*_: object) -> None:
        raise AssertionError("it waits for a writer")

    before = signal.signal(signal.SIGALRM, waited)
    signal.setitimer(signal.ITIMER_REAL, 5)
    try:
        with pytest.raises(ConfigurationError, match="is not a regular file"):
            use(fifo)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@posix
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_key_file_of_another_user_is_rejected(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Its owner could replace the key, whatever the mode."""
    key_file.chmod(mode)
    if key_file.stat().st_uid == 0:  # root's files are accepted, and root can give them away
        os.chown(key_file, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4712)
    remedy = "who can replace the key: chown it to the user of this process"
    message = rf"belongs to another user \(uid \d+\), {remedy}$"
    with pytest.raises(ConfigurationError, match=message):
        FileKey(key_file)


@posix
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs a file of root")
def test_key_file_of_root_is_accepted(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert FileKey(key_file) == StaticKey(KEY)


@pytest.mark.parametrize("content", [b"", b"needle", b"needle" * 10_000])
def test_key_file_without_a_key_is_rejected_without_repeating_it(
    key_file: Path, content: bytes
) -> None:
    key_file.write_bytes(content)
    with pytest.raises(ConfigurationError) as info:
        FileKey(key_file)
    assert "needle" not in str(info.value)


# --- passphrases ---------------------------------------------------------------------------------


async def test_passphrase_uses_the_documented_cost() -> None:
    wrapped = await PassphraseKey(WORDS).wrap(MASTER, b"context")
    version, _, *cost = struct.unpack(">B16sIII", wrapped[:29])
    assert version == 2
    assert cost == [3, 4, 65536]


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("form", ["NFC", "NFD"])
async def test_passphrase_may_be_typed_composed_or_decomposed(form: Any) -> None:
    wrapped = await PassphraseKey("Schlüssel Å").wrap(MASTER, b"")
    typed = unicodedata.normalize(form, "Schlüssel Å")
    assert await PassphraseKey(typed).unwrap(wrapped, b"") == MASTER


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("words", ["\ufb01re", "\uff12"])
async def test_passphrase_is_not_normalised_to_nfkc(words: str) -> None:
    wrapped = await PassphraseKey(words).wrap(MASTER, b"")
    with pytest.raises(TamperedError):
        await PassphraseKey(unicodedata.normalize("NFKC", words)).unwrap(wrapped, b"")


@pytest.mark.usefixtures("cheap")
async def test_passphrase_of_any_characters_works() -> None:
    for words in ("\x00", " ", "世界🌱", "\ud800", "x" * 10_000):
        wrapped = await PassphraseKey(words).wrap(MASTER, b"")
        assert await PassphraseKey(words).unwrap(wrapped, b"") == MASTER


def test_passphrase_has_a_name_by_default() -> None:
    """The database stores this name, so it cannot change."""
    assert PassphraseKey(WORDS).key_id == "passphrase"


def test_empty_passphrase_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        PassphraseKey("")


@pytest.mark.usefixtures("cheap")
async def test_one_start_derives_once() -> None:
    """Two master keys are wrapped with the first start, and unwrapped with each later one."""
    first = PassphraseKey(WORDS)
    with mock.patch.object(passphrase, "Argon2id", wraps=Argon2id) as derive:
        wraps = [await first.wrap(MASTER, b"") for _ in range(3)]
        assert derive.call_count == 1
        later = PassphraseKey(WORDS)
        for wrapped in wraps:
            await later.unwrap(wrapped, b"")
        await later.wrap(MASTER, b"")
        assert derive.call_count == 2


@pytest.mark.usefixtures("cheap")
async def test_service_with_a_passphrase_derives_once_per_start(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'sessions.db'}"
    for _ in range(2):
        with mock.patch.object(passphrase, "Argon2id", wraps=Argon2id) as derive:
            key = PassphraseKey(WORDS)
            async with EncryptedSessionService(url, AesGcmBackend(key)) as service:
                await service.create_session(app_name="a", user_id="u")
            assert derive.call_count == 1


@pytest.mark.usefixtures("cheap")
async def test_key_that_was_derived_before_is_used_without_a_thread() -> None:
    key = PassphraseKey(WORDS)
    wrapped = await key.wrap(MASTER, b"")
    with mock.patch("asyncio.to_thread", side_effect=AssertionError):
        assert await key.unwrap(wrapped, b"") == MASTER
        await key.wrap(MASTER, b"")


@pytest.mark.usefixtures("cheap")
async def test_keys_that_an_attacker_stores_are_neither_cached_nor_occupy_the_threads() -> None:
    """asyncio has few threads, and other tasks need them."""
    key = PassphraseKey(WORDS)
    headers = [stored((1, 1, 8 + number)) for number in range(40)]
    to_thread, running = asyncio.to_thread, [0]

    async def counted(*call: Any) -> Any:
        running.append(running[-1] + 1)
        try:
            return await to_thread(*call)
        finally:
            running.append(running[-1] - 1)

    with mock.patch("asyncio.to_thread", counted):
        junk = asyncio.gather(*(key.unwrap(one, b"") for one in headers), return_exceptions=True)
        assert {type(error) for error in await junk} == {TamperedError}
    assert max(running) == 1
    with mock.patch.object(passphrase, "Argon2id", wraps=Argon2id) as derive:
        for _ in range(2):
            with pytest.raises(TamperedError):
                await key.unwrap(headers[0], b"")
    assert derive.call_count == 2


async def test_two_derivations_at_once_do_not_deadlock() -> None:
    """At full cost: with several lanes, two derivations at once never ended."""
    keys = [PassphraseKey(WORDS) for _ in range(2)]
    wrapped = await asyncio.gather(*(key.wrap(MASTER, b"") for key in keys))
    again = PassphraseKey(WORDS)
    assert await asyncio.gather(*(again.unwrap(one, b"") for one in wrapped)) == [MASTER] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.usefixtures("cheap")
def test_process_that_was_forked_during_a_derivation_can_derive() -> None:
    """Nobody releases the lock of the parent's derivation in the child."""
    parent = os.getpid()
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(**cost: Any) -> Argon2id:
        if os.getpid() == parent:
            has_begun.set()
            may_end.wait(10)
        return Argon2id(**cost)

    def derive() -> None:
        asyncio.run(PassphraseKey(WORDS).wrap(MASTER, b""))

    with mock.patch.object(passphrase, "Argon2id", slow), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 and later warn of forks with several threads
        thread = threading.Thread(target=derive)
        thread.start()
        assert has_begun.wait(10)
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # ends the child if it waits for the lock
            try:
                derive()
                os._exit(0)
            finally:
                os._exit(1)
        may_end.set()
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def test_event_loop_runs_on_during_a_derivation() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await PassphraseKey(WORDS).wrap(MASTER, b"")
    ticking.cancel()
    assert ticks > 3


EXPENSIVE = {
    "memory": (3, 4, 65537),
    "all the memory there is": (3, 4, 2**32 - 1),
    "iterations": (4, 4, 65536),
    "all iterations there are": (2**32 - 1, 4, 65536),
    "lanes": (3, 5, 65536),
}
IMPOSSIBLE = {"iterations": (0, 1, 8), "lanes": (1, 0, 8), "memory": (1, 4, 8), "all": (0, 0, 0)}


def stored(cost: tuple[int, int, int]) -> bytes:
    return struct.pack(">B16sIII", 2, bytes(16), *cost) + bytes(60)


@pytest.mark.parametrize("cost", EXPENSIVE.values(), ids=EXPENSIVE)
async def test_stored_cost_beyond_the_limits_is_rejected_before_it_is_paid(
    cost: tuple[int, int, int],
) -> None:
    began = time.perf_counter()
    with (
        mock.patch.object(passphrase, "Argon2id") as argon2,
        pytest.raises(TamperedError, match="cost is above the limits") as rejected,
    ):
        await PassphraseKey(WORDS).unwrap(stored(cost), b"")
    argon2.assert_not_called()
    assert rejected.value.reason == Reason.MALFORMED
    assert time.perf_counter() - began < 5


async def test_higher_stored_cost_is_accepted_if_the_caller_allows_it() -> None:
    header = stored((4, 5, 65537))[:29]
    key = Argon2id(salt=bytes(16), length=32, iterations=4, lanes=5, memory_cost=65537)
    sealed = Aes256Gcm(key.derive(WORDS.encode())).encrypt(MASTER, header + b"context")
    allowed: dict[str, Any] = {"max_iterations": 4, "max_lanes": 5, "max_memory_kib": 65537}
    assert await PassphraseKey(WORDS, **allowed).unwrap(header + sealed, b"context") == MASTER
    for name, limit in allowed.items():
        with pytest.raises(TamperedError, match="cost is above the limits"):
            await PassphraseKey(WORDS, **allowed | {name: limit - 1}).unwrap(
                header + sealed, b"context"
            )


MALFORMED = [(stored(cost), "cost is not valid") for cost in IMPOSSIBLE.values()] + [
    (wrapped, "not a key wrapped by a passphrase")
    for wrapped in (b"", b"\x02" + bytes(27), b"\x01" + bytes(60))
]


@pytest.mark.parametrize(("wrapped", "text"), MALFORMED)
async def test_key_that_no_passphrase_has_wrapped_is_malformed(wrapped: bytes, text: str) -> None:
    with pytest.raises(TamperedError, match=text) as rejected:
        await PassphraseKey(WORDS).unwrap(wrapped, b"")
    assert rejected.value.reason == Reason.MALFORMED


async def test_build_without_argon2_says_what_to_install() -> None:
    unsupported = UnsupportedAlgorithm("no Argon2id here")
    with (
        mock.patch.object(passphrase, "Argon2id", side_effect=unsupported),
        pytest.raises(ConfigurationError, match="install a cryptography wheel"),
    ):
        await PassphraseKey(WORDS).wrap(MASTER, b"")


def test_passphrases_differ_by_words_and_name() -> None:
    assert PassphraseKey(WORDS) == PassphraseKey(WORDS)
    assert hash(PassphraseKey(WORDS)) == hash(PassphraseKey(WORDS))
    assert PassphraseKey(WORDS) != PassphraseKey("others")
    assert PassphraseKey(WORDS) != PassphraseKey(WORDS, key_id="old")
    assert PassphraseKey(WORDS) != WORDS


# --- key specs -----------------------------------------------------------------------------------


def test_specs_name_a_key_in_the_environment_or_in_a_file(
    monkeypatch: pytest.MonkeyPatch, key_file: Path
) -> None:
    monkeypatch.setenv("A_KEY", TEXT)
    assert key_provider("env:A_KEY") == StaticKey(KEY)
    assert key_provider(f"file:{key_file}") == StaticKey(KEY)


def test_spec_names_a_passphrase_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORDS", WORDS)
    assert key_provider("passphrase-env:WORDS") == PassphraseKey(WORDS)


def test_path_in_a_spec_may_hold_colons(key_file: Path) -> None:
    other = key_file.rename(key_file.with_name("a:b.key"))
    assert key_provider(f"file:{other}") == StaticKey(KEY)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "env",
        "env:",
        ":A_KEY",
        "ENV:A_KEY",
        " env:A_KEY",
        "needle:A_KEY",
        TEXT,
        "file:",
        "a:b:c",
    ],
)
def test_spec_that_is_none_is_answered_with_all_schemes_and_not_repeated(spec: str) -> None:
    with pytest.raises(ConfigurationError) as info:
        key_provider(spec)
    assert str(info.value) == (
        "not a key spec that this version knows; it knows env:..., file:..., passphrase-env:..., "
        "vault:..., aws-kms:..., gcp-kms:..., pkcs11:..."
    )


def test_key_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"file '/nowhere/root\.key': No such file"):
        key_provider("file:/nowhere/root.key")


def test_backends_take_specs_and_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", TEXT)
    provider = PassphraseKey(WORDS)
    assert root_key("env:A_KEY") == root_key(KEY) == root_key(TEXT) == StaticKey(KEY)
    assert root_key(provider) is provider


@pytest.mark.parametrize("key", [None, 7, object(), ["needle"], StaticKey])
def test_value_that_names_no_root_key_is_rejected(key: Any) -> None:
    with pytest.raises(ConfigurationError) as info:
        root_key(key)
    assert "needle" not in str(info.value)


async def test_header_that_was_not_authentic_is_not_used_to_wrap() -> None:
    """An attacker who can write to the database stores a header of the lowest cost."""
    wrapped = await PassphraseKey(WORDS).wrap(b"k" * 32, b"context")
    header = wrapped[:-60]  # before nonce, ciphertext and tag
    weak = header[:-12] + struct.pack(">III", 1, 1, 8)  # iterations, lanes, KiB
    other = PassphraseKey(WORDS)
    with pytest.raises(TamperedError, match=r"modified|wrong"):
        await other.unwrap(weak + wrapped[-60:], b"context")
    assert not (await other.wrap(b"k" * 32, b"context")).startswith(weak)
