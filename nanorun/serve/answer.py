"""An answer on its way out: whole, or as a stream of server-sent events while it is written.

While it is sent, the connection is watched: a client that leaves ends its request, and the slots are free
for others. A stream sends what has gathered since its last write, so a chunk may hold several tokens (the engine
spaces them: worker.py). When nothing happens for a while (the request waits for a slot), a comment keeps the
connection alive.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanorun.infer.request import Event, Reply, Request
from nanorun.serve.choices import News, chat_logprobs, text_logprobs
from nanorun.serve.desk import Delivery
from nanorun.serve.errors import ApiError, failed, timed_out
from nanorun.serve.metrics import Metrics
from nanorun.serve.options import Limits
from nanorun.text.tokenizer import Tokenizer

BEGIN_S = 0.2  # for the first words of a stream, with which its status goes; then it goes without them
KEEP_ALIVE_S = 10.0
log = logging.getLogger("nanorun.serve")
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class Order:
    """What was asked, in the engine's terms, and how the answer should look."""

    requests: Sequence[Request]
    model: str
    fingerprint: str
    chat: bool
    stream: bool
    usage: bool  # at the end of a stream
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def samples(self) -> int:
        return self.requests[0].samples  # the same for all

    def frame(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": f"{kind}.chunk" if self.chat and self.stream else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


class Answer(Response):
    def __init__(
        self, order: Order, delivery: Delivery, tokenizer: Tokenizer, limits: Limits, metrics: Metrics
    ) -> None:
        super().__init__(media_type="text/event-stream" if order.stream else "application/json")
        self._order, self._delivery, self._limits, self._metrics = order, delivery, limits, metrics
        self._tokenizer = tokenizer
        self._replies: list[Reply | None] = [None] * (len(order.requests) * order.samples)
        self._offsets = [0] * len(self._replies)  # characters of tokens whose log-probabilities were told
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.answer_s):
                left = await _first(self._write(send), _gone(receive))
            self._metrics.disconnects += left
        except TimeoutError:
            await self._fail(timed_out(self._limits.answer_s), scope, receive, send)
        except _ReaderStalled:
            self._metrics.disconnects += 1
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            log.exception("an answer broke")
            await self._fail(failed(), scope, receive, send)
        finally:
            self._delivery.close()
            self._metrics.duration.add(time.perf_counter() - self._delivery.begun)

    async def _write(self, send: Send) -> None:
        self._delivery.deliver(self._order.requests)
        if self._order.stream:
            await self._write_stream(send)
        else:
            await self._write_whole(send)

    async def _write_whole(self, send: Send) -> None:
        choices: list[Any] = [None] * len(self._replies)
        while None in self._replies:
            for number, event in await self._arrivals():
                at, news = number * self._order.samples + event.sample, News()
                news.add(event)
                self._replies[at] = event.reply
                choices[at] = self._whole_choice(at, news)
        self.body = _json(self._order.frame(choices, usage=self._usage()))
        self.headers["content-length"] = str(len(self.body))
        await self._send(send, self.body, last=True)

    async def _write_stream(self, send: Send) -> None:
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # a proxy should not hold it back
        del self.headers["content-length"]
        extra = {"usage": None} if self._order.usage else {}
        chunks: list[dict[str, Any]] = []
        if self._order.chat:
            role = {"role": "assistant", "content": ""}
            chunks += [self._chunk(at, role) for at in range(len(self._replies))]
        while None in self._replies:
            news: dict[int, News] = {}
            arrivals = await self._arrivals(KEEP_ALIVE_S if self._started else BEGIN_S)
            for number, event in arrivals:
                at = number * self._order.samples + event.sample
                news.setdefault(at, News()).add(event)
                self._replies[at] = event.reply or self._replies[at]
            chunks += [chunk for at, new in news.items() for chunk in self._chunks(at, new)]
            data = b"".join([_sse(self._order.frame([chunk], **extra)) for chunk in chunks])
            chunks.clear()
            done = None not in self._replies
            if done:  # one write for all of the end
                data += _sse(self._order.frame([], usage=self._usage())) if self._order.usage else b""
                data += b"data: [DONE]\n\n"
            if data or not arrivals:
                await self._send(send, data or b": still here\n\n", last=done)

    async def _arrivals(self, patience: float = KEEP_ALIVE_S) -> list[tuple[int, Event]]:
        arrivals: list[tuple[int, Event]] = []
        for number, event in await self._delivery.take(patience):
            if isinstance(event, BaseException):
                raise event
            arrivals.append((number, event))
        return arrivals

    # -- shapes --------------------------------------------------------------------------------------

    def _whole_choice(self, at: int, news: News) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": at}
        if self._order.chat:
            choice["message"] = {"role": "assistant", "content": news.text, "refusal": None}
            if news.calls:
                choice["message"]["nanorun_parts"] = news.parts
        else:
            choice["text"] = news.text
        return {**choice, "logprobs": self._logprobs(at, news), "finish_reason": news.finish}

    def _chunks(self, at: int, news: News) -> list[dict[str, Any]]:
        """One chunk for what is new; a tool's part stands in chunks of its own, in order."""
        logprobs = self._logprobs(at, news)
        if not self._order.chat:
            if not news.text and news.finish is None and not news.logprobs:
                return []
            choice = {"text": news.text, "index": at, "logprobs": logprobs, "finish_reason": news.finish}
            return [choice]
        chunks = []
        for part in news.parts:
            text = part["text"] if part["type"] == "text" else None
            delta: dict[str, Any] = {"content": text} if text is not None else {"nanorun_parts": [part]}
            if delta.get("content") != "":
                chunks.append(self._chunk(at, delta))
        if logprobs is not None and news.logprobs:
            if not chunks:
                chunks.append(self._chunk(at, {}))
            chunks[0]["logprobs"] = logprobs
        if news.finish is not None:
            chunks.append(self._chunk(at, {}, news.finish))
        return chunks

    def _chunk(self, at: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"index": at, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _logprobs(self, at: int, news: News) -> dict[str, Any] | None:
        if self._order.requests[0].logprobs is None:
            return None
        if self._order.chat:
            return chat_logprobs(self._tokenizer, news.logprobs)
        told = text_logprobs(self._tokenizer, news.logprobs, self._offsets[at])
        self._offsets[at] += sum(map(len, told["tokens"]))
        return told

    def _usage(self) -> dict[str, Any]:
        replies = [reply for reply in self._replies if reply is not None]
        prompt = sum(reply.prompt_tokens for reply in replies[:: self._order.samples])
        cached = sum(reply.reused_tokens for reply in replies[:: self._order.samples])
        written = sum(reply.forced.count(False) for reply in replies)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    # -- sending -------------------------------------------------------------------------------------

    async def _send(self, send: Send, body: bytes, *, last: bool = False) -> None:
        """A reader that takes nothing for too long is given up."""
        try:
            async with asyncio.timeout(self._limits.stall_s):
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": body, "more_body": not last})
        except TimeoutError:
            raise _ReaderStalled from None

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error.response()(scope, receive, send)
        elif self._order.stream:  # the status is said already
            try:
                await self._send(send, b"data: " + error.body.encode() + b"\n\n", last=True)
            except (_ReaderStalled, OSError):
                self._metrics.disconnects += 1


class _ReaderStalled(Exception):
    """Of a reader that stopped reading."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first(work: Awaitable[None], gone: Awaitable[None]) -> bool:
    """Works until done, or until the client has gone: True."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
            return False
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _json(value: Any) -> bytes:
    return _encoder.encode(value).encode()


def _sse(value: Any) -> bytes:
    return b"data: " + _json(value) + b"\n\n"
