"""Keep the root key in AWS KMS; here, a server on this machine replaces AWS.

    pip install '.[aws]' 'moto[kms,server]'
    python examples/aws_kms.py

With AWS itself, leave out the server, the endpoint and the credentials: the library of AWS finds
the credentials of the machine.  The page docs/key-services.md names the permissions.
"""

import asyncio
import logging
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import botocore.session
from moto.server import ThreadedMotoServer

from adk_secure_sessions import AesGcmBackend, AwsKmsKey, EncryptedSessionService, KeyServiceError

STAND_IN = {
    "AWS_ACCESS_KEY_ID": "example",
    "AWS_SECRET_ACCESS_KEY": "example",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "NO_PROXY": "127.0.0.1",  # a proxy could not reach this machine
}


async def converse(db: Path, arn: str) -> None:
    backend = AesGcmBackend(AwsKmsKey(arn))  # or AesGcmBackend(f"aws-kms:{arn}")
    async with EncryptedSessionService(f"sqlite+aiosqlite:///{db}", backend) as service:
        await service.create_session(
            app_name="clinic", user_id="ada", state={"user:allergies": ["penicillin"]}
        )
        found = await service.list_sessions(app_name="clinic", user_id="ada")
        print(f"  sessions of ada: {len(found.sessions)}")


def show_master_keys(db: Path) -> None:
    with closing(sqlite3.connect(db)) as connection:
        rows = connection.execute("SELECT purpose, root_key_id, wrapped FROM secure_keyring")
        for purpose, root_key, wrapped in rows:
            print(f"  {purpose:<6} wrapped by {root_key}")
            print(f"         ...{wrapped[-24:].hex()} ({len(wrapped)} bytes)")


def create_key(endpoint: str) -> str:
    kms = botocore.session.Session().create_client("kms", endpoint_url=endpoint)
    try:
        return str(kms.create_key()["KeyMetadata"]["Arn"])
    finally:
        kms.close()


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for each request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    os.environ |= {**STAND_IN, "AWS_ENDPOINT_URL_KMS": endpoint}
    with tempfile.TemporaryDirectory() as directory:
        db = Path(directory) / "sessions.db"
        try:
            arn = create_key(endpoint)
            print("A session, encrypted with keys that KMS wraps:")
            asyncio.run(converse(db, arn))
            print("\nThe master keys in the database, which only KMS can unwrap:")
            show_master_keys(db)
            print("\nAnother process opens the database with the same ARN:")
            asyncio.run(converse(db, arn))
        finally:
            server.stop()
        print("\nWithout KMS, nobody can open the database:")
        try:
            asyncio.run(converse(db, arn))
        except KeyServiceError as error:
            print(f"  {error}")
        else:
            raise AssertionError("the database was opened without KMS")


if __name__ == "__main__":
    main()
