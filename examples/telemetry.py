"""Turn the metrics of a service into Prometheus text, which the dashboard and the alerts read.

    pip install '.[aws]' 'moto[kms,server]' opentelemetry-exporter-prometheus
    python examples/telemetry.py                  # print the text
    python examples/telemetry.py --port 9464      # serve it until Ctrl+C

With a port, `prometheus --config.file examples/monitoring/prometheus.yml` collects the metrics and
evaluates examples/monitoring/alerts.yml.  Import examples/monitoring/dashboard.json into Grafana.
The page docs/telemetry.md lists the metrics.

Your application needs only `measure` and `start_http_server`.  The rest of this program makes each
metric count something: a conversation, a stale session, a rotation, a tampered record, and a
key service that cannot be reached.
"""

import argparse
import asyncio
import logging
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import botocore.session
from google.adk.events import Event, EventActions
from moto.server import ThreadedMotoServer
from opentelemetry import metrics
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import generate_latest, start_http_server

from adk_secure_sessions import (
    AesGcmBackend,
    AwsKmsKey,
    DecryptionError,
    EncryptedSessionService,
    KeyServiceError,
    StaleSessionError,
)
from adk_secure_sessions.maintenance import Database, rotate_data, verify

WHO: dict[str, Any] = {"app_name": "clinic", "user_id": "ada"}
NOBODY = "http://127.0.0.1:9"  # no key service listens here
STAND_IN = {
    "AWS_ACCESS_KEY_ID": "example",
    "AWS_SECRET_ACCESS_KEY": "example",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "NO_PROXY": "127.0.0.1",  # a proxy could not reach this machine
}


def measure() -> None:
    """Begin to measure: the library finds the provider by itself."""
    reader = PrometheusMetricReader(disable_target_info=True)
    metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))


def prometheus_text() -> str:
    """Return what a Prometheus would read, without the metrics of other libraries."""
    lines = generate_latest().decode().splitlines()
    return "\n".join(line for line in lines if "adk_secure_sessions_" in line)


# --- work to measure -----------------------------------------------------------------------------


def event(number: int) -> Event:
    return Event(author="user", actions=EventActions(state_delta={"turn": number}))


async def converse(service: EncryptedSessionService) -> str:
    """Append events; also at the same time to several sessions, and to an outdated one."""
    session = await service.create_session(**WHO)
    for number in range(5):
        await service.append_event(session, event(number))
    others = [await service.create_session(**WHO) for _ in range(8)]
    await asyncio.gather(*(service.append_event(one, event(0)) for one in others))
    outdated = await service.get_session(**WHO, session_id=session.id)
    assert outdated
    await service.append_event(session, event(5))
    try:
        await service.append_event(outdated, event(6))
    except StaleSessionError:
        pass  # the application reads the session again
    await service.list_sessions(**WHO)
    return session.id


async def rotate(url: str, backend: AesGcmBackend) -> None:
    async with Database(url, backend) as database:
        await rotate_data(database)
        await verify(database)


async def read_tampered(path: Path, service: EncryptedSessionService, session_id: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE secure_events SET event = zeroblob(100) WHERE seq = 1")
    try:
        await service.get_session(**WHO, session_id=session_id)
    except DecryptionError:
        pass  # the rejected record is counted, and is in the audit log


async def open_without_key_service(url: str, key: str) -> None:
    backend = AesGcmBackend(AwsKmsKey(key, endpoint_url=NOBODY, attempts=1))
    try:
        async with EncryptedSessionService(url, backend) as service:
            await service.prepare_tables()
    except KeyServiceError:
        pass  # the service cannot start


async def work(key: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        url, backend = f"sqlite+aiosqlite:///{path}", AesGcmBackend(AwsKmsKey(key))
        async with EncryptedSessionService(url, backend) as service:
            session_id = await converse(service)
            await rotate(url, backend)
            await service.get_user_state(**WHO)  # needs the new data key, which it reads
            await read_tampered(path, service, session_id)
        await open_without_key_service(url, key)


async def work_on(key: str) -> None:
    while True:
        await work(key)
        await asyncio.sleep(0.5)


# --- the program ---------------------------------------------------------------------------------


def create_key(endpoint: str) -> str:
    kms = botocore.session.Session().create_client("kms", endpoint_url=endpoint)
    try:
        return str(kms.create_key()["KeyMetadata"]["Arn"])
    finally:
        kms.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, help="serve the metrics until Ctrl+C; 0: any port")
    port = parser.parse_args().port
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for each request
    stand_in = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)  # instead of AWS
    stand_in.start()
    endpoint = "http://{}:{}".format(*stand_in.get_host_and_port())
    os.environ |= {**STAND_IN, "AWS_ENDPOINT_URL_KMS": endpoint}
    measure()
    try:
        key = create_key(endpoint)
        if port is None:
            asyncio.run(work(key))
            print(prometheus_text())
        else:
            server, _ = start_http_server(port, "127.0.0.1")
            print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
            asyncio.run(work_on(key))
    except KeyboardInterrupt:
        pass
    finally:
        stand_in.stop()


if __name__ == "__main__":
    main()
