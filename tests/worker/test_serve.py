"""How a server listens: TLS, renewed certificates, a socket's path, long headers, ranks and their supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest

from prfaas.worker import supervisor
from prfaas.worker.frontend import FrontEnd, Tls
from prfaas.worker.serve import Worker, by_rank
from prfaas.worker.tls import keep_fresh, server_context
from tests.worker.rig import config, serving, until


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    certfile, keyfile = folder / "tls.crt", folder / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(keyfile), "-out", str(certfile)], check=True, capture_output=True)
    return str(certfile), str(keyfile)


def spoil(path: str) -> None:
    """As a renewal that is not done yet."""
    Path(path).write_text("half written")


async def name_served(port: int, certfile: str) -> str:
    """The common name in the certificate that a server shows; ssl.SSLError if it is not that one."""
    context = ssl.create_default_context(cafile=certfile)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    del reader
    shown = writer.get_extra_info("peercert")["subject"][0][0][1]
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return str(shown)


async def test_answers_over_tls(tmp_path: Path) -> None:
    certfile, keyfile = certificate(tmp_path, "worker")
    tls = replace(config(), front=FrontEnd(tls=Tls(certfile, keyfile)))
    async with serving(tls) as (client,):
        trusted = ssl.create_default_context(cafile=certfile)
        url = f"https://127.0.0.1:{client.worker.port}"
        async with client.session.get(f"{url}/health", ssl=trusted) as response:
            assert response.status == 200
        async with client.session.post(
            f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, ssl=trusted
        ) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):
            await client.session.get(f"http://127.0.0.1:{client.worker.port}/health")


async def test_clients_may_have_to_show_a_certificate(tmp_path: Path) -> None:
    certfile, keyfile = certificate(tmp_path, "worker")
    front = FrontEnd(tls=Tls(certfile, keyfile, ca_certs=certfile, cert_reqs=int(ssl.CERT_REQUIRED)))
    async with serving(replace(config(), front=front)) as (client,):
        url = f"https://127.0.0.1:{client.worker.port}/health"
        bare = ssl.create_default_context(cafile=certfile)
        with pytest.raises(aiohttp.ClientError):
            await client.session.get(url, ssl=bare)
        shown = ssl.create_default_context(cafile=certfile)
        shown.load_cert_chain(certfile, keyfile)
        async with client.session.get(url, ssl=shown) as response:
            assert response.status == 200


async def test_a_renewed_certificate_is_served_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certfile, keyfile = certificate(tmp_path, "old")
    tls = Tls(certfile, keyfile, refresh=True)
    context = server_context(tls)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port: int = server.sockets[0].getsockname()[1]
    refreshing = asyncio.create_task(keep_fresh(tls, context, every=0.01))
    try:
        assert await name_served(port, certfile) == "old"
        spoil(certfile)
        await until(lambda: "cannot be read yet" in caplog.text, "seen half written")
        certificate(tmp_path, "new")
        async with asyncio.timeout(5):
            while True:
                with contextlib.suppress(ssl.SSLError):
                    if await name_served(port, certfile) == "new":
                        break
                await asyncio.sleep(0.01)
    finally:
        refreshing.cancel()
        server.close()
        await server.wait_closed()


async def test_a_certificate_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    worker = Worker(replace(config(), front=FrontEnd(tls=Tls(str(tmp_path / "none")))))
    with pytest.raises(FileNotFoundError, match="none"):
        await worker.start()
    certfile, _ = certificate(tmp_path, "worker")
    with pytest.raises(ssl.SSLError):
        server_context(Tls(certfile, ciphers="NOPE"))


async def test_a_server_on_a_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "vllm.sock")
    async with serving(replace(config(), front=FrontEnd(uds=path))):
        connector = aiohttp.UnixConnector(path)
        async with aiohttp.ClientSession(connector=connector) as session, session.get("http://x/version") as response:
            assert await response.json() == {"version": "0.33.0"}


async def test_headers_may_be_long() -> None:
    async with serving(config()) as (client,):
        response = await client.session.get(f"{client.url}/health", headers={"X-Long": "x" * 100_000})
        assert response.status == 200


def test_every_local_rank_has_ports_of_its_own() -> None:
    front = FrontEnd(local_ranks=3, supervisor_port=9256)
    ranks = by_rank(replace(config("kv_producer"), front=front, port=8000))
    assert [rank.port for rank in ranks] == [8000, 8001, 8002]
    transfers = [rank.kv_transfer for rank in ranks]
    assert [transfer.port for transfer in transfers if transfer] == [0, 1, 2]
    assert len({transfer.engine_id for transfer in transfers if transfer}) == 3
    assert by_rank(config()) == [config()]
    assert [rank.kv_transfer for rank in by_rank(replace(config(), front=front))] == [None] * 3


async def test_the_supervisor_is_healthy_while_every_rank_is() -> None:
    async with serving(config(), config()) as (one, two):
        app = supervisor.application([one.worker.engine, two.worker.engine])
        runner = aiohttp.web.AppRunner(app)
        await runner.setup()
        site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            for dead, status in ((False, 200), (True, 503)):
                if dead:
                    two.worker.engine.die("a test")
                for path in supervisor.PATHS:
                    async with one.session.get(f"http://127.0.0.1:{port}{path}") as response:
                        assert (response.status, await response.text()) == (status, "")
        finally:
            await runner.cleanup()
