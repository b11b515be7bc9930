"""S3 by moto, over HTTP.

How it works: `running()` gives a `Server` with an empty bucket; `object_server.py` says how a test
makes it fail.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import botocore.session
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends

from tests.integrations.object_server import (
    ACCESS_KEY,
    BUCKET,
    REGION,
    SECRET,
    ObjectServer,
    s3_options,
)


class Server(ObjectServer):
    def __init__(self) -> None:
        self._moto: Any = DomainDispatcherApplication(create_backend_app)
        super().__init__()

    def options_at(self, address: str) -> dict[str, Any]:
        return s3_options(address)

    @cached_property
    def admin(self) -> Any:
        return botocore.session.Session().create_client(
            "s3",
            region_name=REGION,
            endpoint_url=self.address,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET,
        )

    def keys(self) -> list[str]:
        found = self.admin.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [one["Key"] for one in found]

    def delete_all(self) -> None:
        for key in self.keys():
            self.admin.delete_object(Bucket=BUCKET, Key=key)

    def make_older(self, by: timedelta) -> None:
        """Move the times of all objects into the past, as if *by* had passed."""
        for _, backend in s3_backends.items():
            for one in backend.values():
                for key in one.buckets[BUCKET].keys.values():
                    key.last_modified -= by

    def answer(self, environ: Any, start_response: Callable[..., Any]) -> Any:
        return self._moto(environ, start_response)


@contextmanager
def running() -> Iterator[Server]:
    server = Server()
    try:
        buckets = [one["Name"] for one in server.admin.list_buckets()["Buckets"]]
        if BUCKET not in buckets:  # moto's buckets outlive the server, in the same process
            place = {"LocationConstraint": REGION}
            server.admin.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place)
        server.clear()
        yield server
    finally:
        server.admin.close()
        server.stop()


if __name__ == "__main__":  # a server in a process of its own, until its standard input ends
    with running() as alone:
        print(alone.address, flush=True)
        sys.stdin.read()
