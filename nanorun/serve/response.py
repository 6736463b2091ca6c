"""The response to a completion request: one JSON object, or a stream of server-sent events.

While the response is sent, the connection is watched: when the client disconnects, its requests are cancelled and
their slots are free for others. A stream sends everything that has arrived since its last write, so a chunk may
hold several tokens (the engine spaces its events: worker.py). While nothing arrives (the request waits for a
slot), a comment keeps the connection alive.

A chat model's answer has parts: text, and for a tool call its code ("python") and its result ("output", or "guess"
if the model made it up). `content` is the text alone, which any client can show, without the gap that a call
would leave in it. `nanorun_parts` is the whole answer in order; a message has it if there is more than text.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanorun.infer.request import Event, PlainText, Reply, Request, join_text
from nanorun.serve.engines import ResponseStream
from nanorun.serve.errors import ApiError, internal_error
from nanorun.serve.metrics import Metrics
from nanorun.serve.options import RequestLimits
from nanorun.text.chat import Piece, join_pieces
from nanorun.text.tokenizer import Tokenizer

FIRST_WRITE_S = 0.2  # the status waits this long for the first words, to go out with them
KEEP_ALIVE_S = 10.0
WRITE_BYTES = 64 * 2**10
log = logging.getLogger("nanorun.serve")
_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class CompletionResponse(Response):
    def __init__(
        self,
        requests: Sequence[Request],  # one per prompt; they differ only in the prompt
        response_stream: ResponseStream,
        limits: RequestLimits,
        metrics: Metrics,
        tokenizer: Tokenizer,
        *,
        model: dict[str, Any],  # the fields of every object that name it
        chat: bool,
        stream: bool,
        include_usage: bool,  # at the end of a stream
        continuous_usage: bool,  # in every chunk, the usage so far
    ) -> None:
        self._requests, self._response_stream = requests, response_stream
        self._limits, self._metrics = limits, metrics
        self._tokenizer, self._chat = tokenizer, chat
        self._include_usage, self._continuous_usage = include_usage, continuous_usage
        self._stream, self._samples = stream, requests[0].samples
        super().__init__(media_type="text/event-stream" if self._stream else "application/json")
        kind = "chat.completion" if chat else "text_completion"
        self._fields = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if chat and self._stream else kind,
            "created": int(time.time()),
            **model,
        }
        self._replies: list[Reply | None] = [None] * (len(requests) * self._samples)  # by choice
        self._sampled_tokens = [0] * len(self._replies)
        self._plain_texts = [PlainText() for _ in self._replies]
        self._text_offsets = [0] * len(self._replies)  # of the next token with logprobs
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.answer_s):
                self._response_stream.submit(self._requests)
                write = self._write_stream(send) if self._stream else self._write_object(send)
                self._metrics.disconnects += await _disconnected_during(write, receive)
        except TimeoutError:
            message = f"The answer was not finished after {self._limits.answer_s:g} s: ask for fewer tokens."
            # A retry would take as long again: the header tells OpenAI's clients not to.
            error = ApiError(408, message, "timeout", headers={"x-should-retry": "false"})
            await self._fail(error, scope, receive, send)
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            log.exception("A response failed.")
            await self._fail(internal_error(), scope, receive, send)
        finally:
            self._response_stream.close()
            self._metrics.duration.add(time.perf_counter() - self._response_stream.start_time)

    async def _write_object(self, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._replies]
        logprobs = [_EncodedLogprobs() for _ in self._replies]
        while None in self._replies:
            events = await self._response_stream.next_events(KEEP_ALIVE_S, keep=True)
            for index, event in events.items():
                self._receive(index, event)
                pieces[index] += event.pieces
                logprobs[index].add(self._logprobs(index, event))
        parts = [_open({**self._fields, "usage": self._usage()}), b',"choices":[']
        for index in range(len(self._replies)):
            choice = _open(self._choice(index, pieces[index]))
            parts += [b"," * bool(index), choice, b',"logprobs":', *logprobs[index].parts(), b"}"]
        parts.append(b"]}")
        self.headers["content-length"] = str(sum(map(len, parts)))
        data = b""
        for part in parts:
            data += part
            if len(data) >= WRITE_BYTES:
                await self._send(send, data, last=False)
                data = b""
        await self._send(send, data, last=True)

    async def _write_stream(self, send: Send) -> None:
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # a proxy must not buffer it
        del self.headers["content-length"]
        usage: dict[str, Any] = {"usage": None} if self._include_usage else {}
        role = {"role": "assistant", "content": ""}
        chunks = [_chunk(index, role) for index in range(len(self._replies))] if self._chat else []
        while None in self._replies:
            events = await self._response_stream.next_events(KEEP_ALIVE_S if self._started else FIRST_WRITE_S)
            for index, event in events.items():
                self._receive(index, event)
                chunks += self._chunks(index, event)
            if self._continuous_usage:
                usage = {"usage": self._usage()}
            data = b"".join([_sse({**self._fields, "choices": [chunk], **usage}) for chunk in chunks])
            chunks.clear()
            done = None not in self._replies
            if done:  # one write for the whole end
                if self._include_usage:
                    data += _sse({**self._fields, "choices": [], "usage": self._usage()})
                data += b"data: [DONE]\n\n"
            if data or not events:
                await self._send(send, data or b": keep-alive\n\n", last=done)

    def _receive(self, index: int, event: Event) -> None:
        self._replies[index], self._sampled_tokens[index] = event.reply, event.sampled_tokens

    # -- JSON ----------------------------------------------------------------------------------------

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Without its logprobs."""
        reply, text = self._replies[index], join_text(pieces)
        assert reply is not None
        choice: dict[str, Any] = {"index": index, "finish_reason": reply.finish}
        if not self._chat:
            return {**choice, "text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if any(kind != "text" for kind, _ in pieces):
            message["nanorun_parts"] = join_pieces(pieces)
        return {**choice, "message": message}

    def _chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """One chunk for each part, in order; with its exact text, unless that is its content."""
        logprobs = self._logprobs(index, event)
        finish = event.reply.finish if event.reply is not None else None
        if not self._chat:
            if not event.text and finish is None and not event.logprobs:
                return []
            return [{"text": event.text, "index": index, "logprobs": logprobs, "finish_reason": finish}]
        chunks = []
        for part in join_pieces(event.pieces):
            content = self._plain_texts[index].push(part["type"], part["text"])
            delta: dict[str, Any] = {"content": content} if content else {}
            if part != {"type": "text", "text": content}:
                delta["nanorun_parts"] = [part]
            if delta:
                chunks.append(_chunk(index, delta))
        if event.logprobs:
            chunks = chunks or [_chunk(index, {})]
            chunks[0]["logprobs"] = logprobs
        return chunks if finish is None else [*chunks, _chunk(index, {}, finish)]

    def _logprobs(self, index: int, event: Event) -> dict[str, Any] | None:
        if self._requests[0].logprobs is None:
            return None
        if self._chat:
            content = [
                {
                    **self._token(token_id, logprobs.under_model),
                    "top_logprobs": [self._token(*other) for other in logprobs.top],
                }
                for token_id, logprobs in event.logprobs
            ]
            return {"content": content, "refusal": None}
        decode = self._tokenizer.decode
        tokens, offsets = [decode([token_id]) for token_id, _ in event.logprobs], list[int]()
        for token in tokens:
            offsets.append(self._text_offsets[index])
            self._text_offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [logprobs.under_model for _, logprobs in event.logprobs],
            "top_logprobs": [{decode([i]): value for i, value in of.top} for _, of in event.logprobs],
            "text_offset": offsets,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.decode_bytes([token_id])
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(request.prompt) for request in self._requests)
        completion = sum(self._sampled_tokens)
        cached = [reply.reused_tokens for reply in self._replies[:: self._samples] if reply is not None]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached)},
        }

    # -- sending -------------------------------------------------------------------------------------

    async def _send(self, send: Send, body: bytes, *, last: bool) -> None:
        """Writes a part of the body, before the first one the status and headers."""
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await error.response()(scope, receive, send)
        elif self._stream:  # the status was sent already
            await self._send(send, b"data: " + error.body.encode() + b"\n\n", last=True)


class _EncodedLogprobs:
    """The logprobs of a choice that is sent as a whole. Its lists are encoded as they arrive: all at once they would
    block the event loop, and as objects they would take ten times the memory."""

    def __init__(self) -> None:
        self._fields: dict[str, list[bytes] | None] | None = None  # the encoded values of each list

    def add(self, logprobs: Mapping[str, list[Any] | None] | None) -> None:
        if logprobs is None:
            return
        if self._fields is None:
            self._fields = {name: None if values is None else [] for name, values in logprobs.items()}
        for name, values in logprobs.items():
            if values and (encoded := self._fields[name]) is not None:
                encoded.append(_encoder.encode(values)[1:-1].encode())

    def parts(self) -> Iterator[bytes]:
        """The parts of the object's JSON."""
        if self._fields is None:
            yield b"null"
            return
        sign = "{"
        for name, encoded in self._fields.items():
            yield f'{sign}"{name}":'.encode()
            yield b"null" if encoded is None else b"[" + b",".join(encoded) + b"]"
            sign = ","
        yield b"}"


async def _disconnected_during(write: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Writes until the end, or until the client disconnects: then True."""

    async def disconnected() -> bool:
        while (await receive())["type"] != "http.disconnect":
            pass
        return not writing.done()  # the end of a response is a disconnect, too

    writing = asyncio.create_task(write)
    watching = asyncio.create_task(disconnected())
    try:
        await asyncio.wait([writing, watching], return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            writing.result()
        return watching.done() and watching.result()
    finally:
        for task in (writing, watching):
            task.cancel()
        await asyncio.gather(writing, watching, return_exceptions=True)


def _chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _open(value: dict[str, Any]) -> bytes:
    """An object without its closing brace."""
    return _encoder.encode(value)[:-1].encode()


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + _encoder.encode(value).encode() + b"\n\n"
