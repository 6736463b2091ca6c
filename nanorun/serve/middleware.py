"""Checks that every request passes before it is parsed, and the security headers of every response.

- The host: a server on the loopback accepts local names only. Otherwise a page in the browser could reach it
  under a name of its own that resolves to this machine (DNS rebinding).
- The API key, compared in constant time, for everything except /health and the page.
- The body: read as a whole, within a size and a time, and only a few large ones at once. The rest of a body that is
  too large is read for a while and discarded, since a client that is still sending would not see the response.
- Response headers that restrict what a browser does with a response.

There is no rate limit per client and no encryption: put a proxy in front of a public server.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanorun.serve.errors import ApiError, internal_error
from nanorun.serve.metrics import Metrics
from nanorun.serve.options import LOOPBACK, ServeOptions

log = logging.getLogger("nanorun.serve")

MAX_DISCARDED = 64 * 2**20  # bytes of a body that is too large
SMALL_BODY = 64 * 2**10  # bytes that every request may send at once
LARGE_BODIES = 32  # that are received at once: the memory that slow clients can occupy
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # no script can turn text into markup
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class SecurityMiddleware:
    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics, paths: Iterable[str]) -> None:
        self._app, self._limits, self._metrics = app, options.limits, metrics
        self._paths = frozenset(paths)  # counted by name
        self._large_bodies = asyncio.Semaphore(LARGE_BODIES)
        self._key = options.api_key.encode() if options.api_key is not None else None
        is_local = options.host in LOOPBACK
        self._hosts = {*LOOPBACK, "[::1]", *options.allow_hosts} if is_local else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        metrics, path = self._metrics, scope["path"]
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store" if path.startswith("/v1/") else "no-cache")
            await send(message)

        metrics.open_requests += 1
        try:
            self._check(Headers(scope=scope), path)
            if (body := await self._read_body(receive)) is not None:
                await self._app(scope, _replay(body, receive), send_with_headers)
        except ApiError as error:
            await error.response()(scope, receive, send_with_headers)
        except Exception:
            log.exception("A request failed.")
            if status:  # the status was sent already: only closing the connection is left
                raise
            await internal_error().response()(scope, receive, send_with_headers)
        finally:
            metrics.open_requests -= 1
            metrics.requests[path if path in self._paths else "other", status or 499] += 1

    def _check(self, headers: Headers, path: str) -> None:
        if self._hosts is not None and _hostname(headers.get("host", "")) not in self._hosts:
            message = "This server accepts its local host names only: --allow-host adds one."
            raise ApiError(403, message, "unknown_host")
        if self._key is not None and (path.startswith("/v1") or path == "/metrics"):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            is_correct = hmac.compare_digest(key.strip().encode("utf-8", "replace"), self._key)
            if scheme.lower() != "bearer" or not is_correct:
                problem = "Incorrect API key provided." if key else "You didn't provide an API key."
                message = f"{problem} Send it in the header 'Authorization: Bearer KEY'."
                raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read_body(self, receive: Receive) -> bytes | None:
        """None if the client has disconnected."""
        limit, chunks, size, more = self._limits.body_bytes, list[bytes](), 0, True
        try:
            async with asyncio.timeout(self._limits.body_s), contextlib.AsyncExitStack() as stack:
                while more and size <= limit + MAX_DISCARDED:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunks.append(message.get("body", b""))
                    was_small, size = size <= SMALL_BODY, size + len(chunks[-1])
                    more = message.get("more_body", False)
                    if more and was_small and size > SMALL_BODY:
                        await stack.enter_async_context(self._large_bodies)
                    if size > limit:
                        chunks.clear()
        except TimeoutError:
            problem = f"The request was not complete after {self._limits.body_s:g} s."
            raise ApiError(408, problem, "timeout", headers={"Connection": "close"}) from None
        if size > limit:
            problem = f"The request is too large: more than {limit} bytes."
            raise ApiError(413, problem, "request_too_large", headers={"Connection": "close"})
        return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that has the whole body in its first message, and does not keep it afterwards."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _hostname(host: str) -> str:
    """localhost:8000 -> localhost, [::1]:8000 -> [::1]"""
    end = host.rfind(":")
    return (host[:end] if end > host.rfind("]") else host).lower()
