"""Key specs: texts such as `env:NAME` that name a root key, for URIs and command lines.

A key spec does not contain the key, so it may appear in logs and process lists.
"""

from importlib import import_module
from typing import cast

from adk_secure_sessions.errors import ConfigurationError
from adk_secure_sessions.hiding import hides_locals
from adk_secure_sessions.keys.providers import KeyProvider, StaticKey, read_environment

# The module and the class of each scheme.  All modules would take 5% of the package's import.
_SCHEMES = {
    "env": ("providers", "EnvironmentKey"),
    "file": ("providers", "FileKey"),
    "passphrase-env": ("passphrase", "PassphraseKey"),
    "vault": ("vault", "VaultKey"),
    "aws-kms": ("aws", "AwsKmsKey"),
    "gcp-kms": ("gcp", "GcpKmsKey"),
    "pkcs11": ("pkcs11", "Pkcs11Key"),
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
    if not (colon and rest and scheme in _SCHEMES):
        known = ", ".join(f"{name}:..." for name in _SCHEMES)
        raise ConfigurationError(f"not a key spec that this version knows; it knows {known}")
    module, name = _SCHEMES[scheme]
    make = getattr(import_module(f"adk_secure_sessions.keys.{module}"), name)
    provider: KeyProvider = make(read_environment(rest) if scheme == "passphrase-env" else rest)
    return provider


@hides_locals
def root_key(key: bytes | str | KeyProvider) -> KeyProvider:
    """Return the provider for *key*: 32 bytes, base64 text, a key spec, or a provider itself."""
    if isinstance(key, str) and ":" in key:  # base64 has no colon
        return key_provider(key)
    if isinstance(key, KeyProvider) and not isinstance(key, type):
        return key
    return StaticKey(cast("bytes | str", key))
