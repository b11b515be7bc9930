"""Key specs: texts such as `env:NAME` that name a root key, for URIs and command lines.

A key spec does not contain the key, so it may appear in logs and process lists.
"""

from collections.abc import Callable
from typing import cast

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.aws import AwsKmsKey
from adk_secure_sessions.keys.gcp import GcpKmsKey
from adk_secure_sessions.keys.passphrase import PassphraseKey
from adk_secure_sessions.keys.pkcs11 import Pkcs11Key
from adk_secure_sessions.keys.providers import (
    EnvironmentKey,
    FileKey,
    KeyProvider,
    StaticKey,
    read_environment,
)
from adk_secure_sessions.keys.vault import VaultKey

_SCHEMES: dict[str, Callable[[str], KeyProvider]] = {
    "env": EnvironmentKey,
    "file": FileKey,
    "passphrase-env": lambda name: PassphraseKey(read_environment(name)),
    "vault": VaultKey,
    "aws-kms": AwsKmsKey,
    "gcp-kms": GcpKmsKey,
    "pkcs11": Pkcs11Key,
}


@hides_locals
def key_provider(spec: str) -> KeyProvider:
    """Return the provider of the root key that `spec` names, such as `env:NAME` or `file:PATH`.

    `docs/key-services.md`, "Key specs", lists all schemes.

    Raises:
        ConfigurationError: The scheme is not known, the key cannot be read, or a library is not
            installed.  The message does not repeat `spec`, which may be a key by mistake.
    """
    scheme, colon, rest = spec.partition(":")
    make = _SCHEMES.get(scheme) if colon and rest else None
    if make is None:
        known = ", ".join(f"{name}:..." for name in _SCHEMES)
        raise ConfigurationError(f"not a key spec that this version knows; it knows {known}")
    return make(rest)


@hides_locals
def root_key(key: bytes | str | KeyProvider) -> KeyProvider:
    """Return the provider for *key*: 32 bytes, base64 text, a key spec, or a provider itself."""
    if isinstance(key, str) and ":" in key:  # base64 has no colon
        return key_provider(key)
    if isinstance(key, KeyProvider) and not isinstance(key, type):
        return key
    return StaticKey(cast("bytes | str", key))
