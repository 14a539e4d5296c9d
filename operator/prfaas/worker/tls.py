"""`--ssl-*`: the server's certificate, and reading it again when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from prfaas.worker.frontend import Tls

log = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0


def server_context(tls: Tls) -> ssl.SSLContext:
    """The context that new connections use; OSError (ssl.SSLError is one) for files that cannot be read."""
    for file in filter(None, (tls.certfile, tls.keyfile, tls.ca_certs)):
        Path(file).open("rb").close()  # its error has the file's name; that of OpenSSL has not
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certfile, tls.keyfile)
    if tls.ca_certs:
        context.load_verify_locations(tls.ca_certs)
    context.verify_mode = ssl.VerifyMode(tls.cert_reqs)
    if tls.ciphers:
        context.set_ciphers(tls.ciphers)
    return context


async def keep_fresh(tls: Tls, context: ssl.SSLContext, every: float = REFRESH_SECONDS) -> None:
    """`--enable-ssl-refresh`: certificates that were renewed on disk serve the connections that come after."""
    seen = _changed_at(tls)
    while True:
        await asyncio.sleep(every)
        now = _changed_at(tls)
        if now == seen:
            continue
        try:
            context.load_cert_chain(tls.certfile, tls.keyfile)
        except OSError as error:  # half of the pair is written: the next look finds the other half
            log.warning("the renewed certificate cannot be read yet: %s", error)
            continue
        seen = now
        log.info("certificate read again from %s", tls.certfile)


def _changed_at(tls: Tls) -> tuple[float, ...]:
    paths = [Path(path) for path in (tls.certfile, tls.keyfile) if path]
    return tuple(path.stat().st_mtime_ns if path.exists() else 0.0 for path in paths)
