"""One HTTP request, done with care: redirects, refusals in plain words, and patience with what may pass.

A redirect is followed by hand, because urllib would send the token along to another host. An answer that says
"not now" (408, 425, 429, 5xx) and every failure of the connection raise `TryAgain`; an answer that says "no"
raises a UserError that says what to do.
"""

import email.utils
import functools
import http.client
import random
import re
import ssl
import string
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from nanorun import __version__
from nanorun.console import size
from nanorun.errors import UserError

_CHUNK = 256 * 1024
_MOST_REDIRECTS = 5
_LONGEST_PAUSE = 30.0
_LONGEST_RETRY_AFTER = 120.0
_REDIRECTS = (301, 302, 303, 307, 308)
_NOT_NOW = (408, 425, 429, 500, 502, 503, 504)
_SHA256 = re.compile(r"[0-9a-f]{64}")

Backoff = Callable[[int, float | None], float]  # (failures in a row, the server's Retry-After) -> seconds
Result = TypeVar("Result")


class TryAgain(Exception):
    """This attempt failed in a way that another one may not."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Stopped(Exception):
    """Somebody set `Session.stop`."""


def wait_before_retry(failures: int, retry_after: float | None) -> float:
    """1, 2, 4 ... 30 s, each spread by half so that many clients do not come back at the same moment.

    A server that says how long to wait (Retry-After) is believed, up to two minutes.
    """
    pause = min(_LONGEST_PAUSE, 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.5)
    return max(pause, min(retry_after or 0.0, _LONGEST_RETRY_AFTER))


@dataclass(frozen=True)
class Session:
    attempts: int = 6  # failures in a row; an attempt that got further starts the count again
    timeout: float = 30.0  # of one silent read, not of the whole
    token: str | None = None
    backoff: Backoff = wait_before_retry
    stop: threading.Event = field(default_factory=threading.Event)

    def open(self, url: str, headers: dict[str, str]) -> tuple[Any, str | None]:
        """The answer (status 200, 206 or 416) and the SHA-256 that a hub names for it on the way, if any."""
        first, token, linked = url, self.token, None
        if token and not (token.isascii() and token.isprintable()):
            raise UserError("The token contains characters that no token has: check HF_TOKEN.")
        for _ in range(1 + _MOST_REDIRECTS):
            request = urllib.request.Request(url, headers={**headers, "Accept-Encoding": "identity"})
            request.add_header("User-Agent", f"nanorun/{__version__}")
            if token:
                request.add_header("Authorization", f"Bearer {token}")
            try:
                answer: Any = _opener().open(request, timeout=self.timeout)
            except urllib.error.HTTPError as refusal:  # an answer too, with another status
                answer = refusal
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _explained(error, url) from error
            linked = linked or sha256_in(answer.headers.get("X-Linked-ETag"))
            if answer.status in (200, 206, 416):
                return answer, linked
            with answer:
                if answer.status not in _REDIRECTS:
                    raise _refusal(answer.status, answer.headers, first)
                target = _target(url, answer.headers.get("Location") or "")
            if urlsplit(url).netloc != urlsplit(target).netloc:
                token = None  # and it stays off, should the way lead back
            url = target
        raise UserError(f"{first} redirects more than {_MOST_REDIRECTS} times: check the address.")

    def keep_trying(self, once: Callable[[], Result], reached: Callable[[], int], url: str) -> Result:
        """Calls `once` until it works, or has failed `attempts` times without `reached()` growing."""
        best, failures = reached(), 0
        while True:
            if self.stop.is_set():
                raise Stopped
            try:
                return once()
            except TryAgain as problem:
                if reached() > best:
                    best, failures = reached(), 0
                failures += 1
                if failures >= self.attempts:
                    raise UserError(
                        f"Could not download {url}: {problem} (attempt {failures} of {self.attempts}). Check "
                        "the network, and HF_ENDPOINT if you set it, then run the same command again: it "
                        "goes on from what is here."
                    ) from problem
                self.stop.wait(self.backoff(failures, problem.after))

    def read_small(self, url: str, limit: int) -> tuple[bytes, Message]:
        """A short answer, such as a listing, and its headers; one longer than `limit` bytes is refused."""

        def once() -> tuple[bytes, Message]:
            response, _ = self.open(url, {})
            with response:
                announced = announced_length(response)
                body = bytearray()
                while chunk := read_some(response):
                    body += chunk
                    if len(body) > limit:
                        raise UserError(f"{url} answers with more than {size(limit)}: that is not a listing.")
                if announced is not None and len(body) < announced:
                    raise TryAgain(f"the connection closed after {len(body)} of {announced} bytes")
                return bytes(body), response.headers

        return self.keep_trying(once, lambda: 0, url)


def read_some(response: Any) -> bytes:
    """What has arrived, at most a chunk of it; b"" at the end."""
    try:
        return response.read1(_CHUNK)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _explained(error, response.url) from error


def announced_length(response: Any) -> int | None:
    value = response.headers.get("Content-Length") or ""
    return int(value) if value.isdecimal() and not response.chunked else None


def sha256_in(etag: str | None) -> str | None:
    bare = (etag or "").removeprefix("W/").strip('"').lower()
    return bare if _SHA256.fullmatch(bare) else None


class _LeaveRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_LeaveRedirects)  # with the proxies that the environment names


def _target(url: str, location: str) -> str:
    target = quote(urljoin(url, location), safe=string.punctuation, encoding="iso-8859-1")
    host = urlsplit(target).hostname
    if urlsplit(target).scheme not in ("http", "https") or not host or not location:
        raise UserError(f"{url} redirects to {location!r}, which is not a web address: refused.")
    if urlsplit(url).scheme == "https" and urlsplit(target).scheme == "http":
        raise UserError(
            f"{url} redirects from https to plain http on {host}: refused, for anyone could alter it."
        )
    return target


def _explained(error: Exception, url: str) -> Exception:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    host = urlsplit(url).netloc
    if isinstance(reason, ssl.SSLCertVerificationError):
        return UserError(
            f"The certificate of {host} cannot be verified ({reason.verify_message}): check the address, "
            "this machine's clock and its CA certificates (SSL_CERT_FILE)."
        )
    if isinstance(error, ValueError):
        return UserError(f"{url} is not a web address that can be opened ({error}): check the name.")
    if isinstance(reason, TimeoutError):
        return TryAgain(f"{host} did not answer in time")
    return TryAgain(f"the connection to {host} failed ({str(reason) or type(reason).__name__})")


def _refusal(status: int, headers: Message, url: str) -> Exception:
    if status in _NOT_NOW:
        reason = "the server asks to slow down" if status == 429 else "the server has trouble"
        return TryAgain(f"{reason} (HTTP {status})", _retry_after(headers.get("Retry-After")))
    if status == 401:
        advice = "needs a valid token: check the name, or set HF_TOKEN to a token of yours"
    elif status == 403:
        advice = "is not open to you: accept its terms on its web page and set HF_TOKEN to a token of yours"
    elif status in (404, 410):
        advice = "does not exist: check the name and the revision, and HF_ENDPOINT if you set it"
    else:
        advice = "was refused: check the address"
    return UserError(f"{url} {advice} (HTTP {status}).")


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header, which is a number or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
