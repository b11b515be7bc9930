"""Providers in processes that were forked after their first use."""

import asyncio
import os
from collections.abc import Callable

import pytest

from adk_secure_sessions import AwsKmsKey, KeyProvider, Pkcs11Key, VaultKey
from tests.key_services.aws import Kms
from tests.key_services.softhsm import PIN, SoftHsm
from tests.key_services.vault import Vault
from tests.processes import results

MASTER = bytes(range(32))


def test_vault_answers_forks(vault: Vault) -> None:
    job = (with_vault, vault.address, vault.role_id, vault.secret_id)
    assert results(job) == [[0]]
    # The fork uses the token that its parent got by logging in.
    assert vault.requests.count("auth/approle/login") == 1


@pytest.mark.soak
def test_aws_answers_forks(kms: Kms) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert results((with_aws, kms.new_key(), kms.address, environment)) == [[0]]


def test_pkcs11_answers_forks(softhsm: SoftHsm) -> None:
    environment = {name: os.environ[name] for name in ("SOFTHSM2_CONF", "PKCS11_MODULE")}
    assert results((with_pkcs11, environment)) == [[0]]


def with_pkcs11(say: Callable[[object], None], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    fork_and_unwrap(say, Pkcs11Key("clinic/a", pin=PIN))


def with_vault(say: Callable[[object], None], address: str, role_id: str, secret_id: str) -> None:
    key = VaultKey("transit/clinic", address=address, role_id=role_id, secret_id=secret_id)
    fork_and_unwrap(say, key)


def with_aws(
    say: Callable[[object], None], arn: str, address: str, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    fork_and_unwrap(say, AwsKmsKey(arn, endpoint_url=address))


def fork_and_unwrap(say: Callable[[object], None], key: KeyProvider) -> None:
    wrapped = asyncio.run(key.wrap(MASTER, b"context"))
    if pid := os.fork():
        _, status = os.waitpid(pid, 0)
        asyncio.run(key.unwrap(wrapped, b"context"))  # the parent still works, too
        say(os.waitstatus_to_exitcode(status))
    else:
        opened = asyncio.run(key.unwrap(wrapped, b"context"))
        os._exit(opened != MASTER)


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
