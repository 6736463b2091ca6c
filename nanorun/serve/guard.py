"""What every request passes before anything reads it, and every response on its way out.

- The host it was sent to: a server on the loopback answers to local names only, or a page in the browser
  could reach it under a name of its own that it has pointed here (DNS rebinding).
- The API key, compared in constant time, for everything but /health and the page.
- The body: read whole, within bytes and seconds. One that is too large is read on for a while and thrown
  away, since a client that is still sending would not see the answer.
- Headers that keep a browser from doing anything with an answer but what we mean.

It says nothing about how often a client may ask, and does not encrypt: for a public server put a proxy in
front that does.
"""

import asyncio
import hmac
import logging
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanorun.serve.errors import ApiError, failed
from nanorun.serve.metrics import Metrics
from nanorun.serve.options import LOOPBACK, Options

log = logging.getLogger("nanorun.serve")

THROWN_AWAY = 64 * 2**20  # bytes of a body that is too large
SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # text cannot become markup, whatever a script does
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class Guard:
    def __init__(self, app: ASGIApp, options: Options, metrics: Metrics, paths: Iterable[str]) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._paths = frozenset(paths)  # those that are counted by name
        self._key = options.api_key.encode() if options.api_key is not None else None
        local = options.host in LOOPBACK
        self._hosts = {*LOOPBACK, "[::1]", *options.allow_hosts} if local else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, path = self._metrics, scope["path"]
        status = 0

        async def decorated(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY.items():
                    headers.setdefault(name, value)
                if not headers.get("cache-control"):
                    headers["cache-control"] = "no-store" if path.startswith("/v1/") else "no-cache"
            await send(message)

        metrics.open_requests += 1
        try:
            self._check(scope, path)
            await self._app(scope, await self._bounded(scope, receive), decorated)
        except ApiError as error:
            await error.response()(scope, receive, decorated)
        except Exception:
            log.exception("a request broke")
            if status:  # it is said already: closing the connection is all that is left
                raise
            await failed().response()(scope, receive, decorated)
        finally:
            metrics.open_requests -= 1
            metrics.requests[path if path in self._paths else "other", status or 499] += 1

    def _check(self, scope: Scope, path: str) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None and _hostname(headers.get("host", "")) not in self._hosts:
            raise ApiError(
                403,
                "This server answers to its local names only: --allow-host adds one.",
                code="unknown_host",
            )
        if self._key is not None and (path.startswith("/v1") or path == "/metrics"):
            kind, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key)
            if kind.lower() != "bearer" or not right:
                known = "Incorrect API key provided." if given else "You didn't provide an API key."
                said = f"{known} Send it in the header 'Authorization: Bearer KEY'."
                raise ApiError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """A `receive` that gives the whole body at once."""
        limits = self._options.limits
        try:
            async with asyncio.timeout(limits.body_s):
                body = await _read(receive, limits.body_bytes)
        except TimeoutError:
            raise ApiError(
                408,
                f"The request had not arrived after {limits.body_s:g} s.",
                code="timeout",
                headers={"Connection": "close"},
            ) from None
        given = False

        async def replay() -> Message:
            nonlocal given
            if given or body is None:
                return await receive() if body is not None else {"type": "http.disconnect"}
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay


async def _read(receive: Receive, most: int) -> bytes | None:
    """None: the client has gone."""
    chunks, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= most:
            chunks.append(chunk)
        else:
            chunks.clear()
        if not message.get("more_body", False) or size > most + THROWN_AWAY:
            break
    if size > most:
        raise ApiError(
            413,
            f"The request is larger than {most} bytes: send less of it.",
            code="request_too_large",
            headers={"Connection": "close"},
        )
    return b"".join(chunks)


def _hostname(host: str) -> str:
    """localhost:8000 -> localhost, [::1]:8000 -> [::1]"""
    end = host.rfind(":")
    return (host[:end] if end > host.rfind("]") else host).lower()
