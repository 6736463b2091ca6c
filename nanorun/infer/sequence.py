"""One sequence while it is generated: its tokens, its text, and its finish reason.

Text is emitted once it is final. An incomplete UTF-8 character is held back until its last byte has arrived, and
the end of the text is held back while it may be the beginning of a stop string.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from nanorun.infer.cache import Slot
from nanorun.infer.request import Event, Finish, Logprobs, Reply, Request, TokenLogprobs, join_text
from nanorun.text.chat import Piece, ReplyStream, overlap
from nanorun.text.tokenizer import Tokenizer

NO_LOGPROBS = Logprobs(0.0, 0.0)  # of a forced token


class TextStream:
    """Incremental detokenization: tokens in, pieces of final text out; `stopped` once a stop string has appeared.

    Each part of a reply is searched for stop strings, except the output of a tool.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._parts, self._stops = tokenizer, ReplyStream(tokenizer), stops
        self._kind, self._held_back = "text", ""
        self._decoded, self._emitted = 0, 0  # characters of sampled tokens
        # Logprobs of tokens whose text is not emitted yet, with the position at which that text begins.
        self._pending: list[tuple[int, TokenLogprobs]] = []
        self.stopped = False

    def push(self, *ids: int, logprobs: Logprobs | None = None, forced: bool = False) -> list[Piece]:
        """Truncates at a stop string, and holds back what may be the beginning of one.

        With `logprobs`, `ids` is one token: `take_logprobs` returns its logprobs once its text is emitted.
        """
        token_start, pieces = self._decoded, list[Piece]()
        for kind, text in self._parts.push(*ids):
            if forced:
                pieces += [*self.flush(), (kind, text)]
                continue
            if self.stopped:
                break
            kind = "guess" if kind == "output" else kind
            start, self._decoded = self._decoded, self._decoded + len(text)
            if not self._stops or not text:  # a piece without text begins another part
                pieces += [*self.flush(), (kind, text)]
                continue
            if kind != self._kind:
                pieces += self._release(start)
            self._kind, text = kind, self._held_back + text
            matches = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
            self.stopped = bool(matches)
            keep = 0 if matches else max(overlap(text, stop) for stop in self._stops)
            end = min(matches) if matches else len(text) - keep
            self._emitted += end
            self._held_back = text[len(text) - keep :]
            if matches or end:
                pieces.append((kind, text[:end]))
        if logprobs is not None and self._parts.kind == "text" and not self._tokenizer.is_special(ids[0]):
            self._pending.append((token_start, (ids[0], logprobs)))
        return pieces

    def flush(self) -> list[Piece]:
        """The text that was held back for a stop string. An incomplete character is dropped."""
        return self._release(self._decoded)

    def take_logprobs(self, *, at_end: bool) -> list[TokenLogprobs]:
        """Of tokens whose text has been emitted, at least in part. The tokens of a stop string are left out."""
        count = len(self._pending)
        if self.stopped or not at_end:
            count = next((at for at, (start, _) in enumerate(self._pending) if start >= self._emitted), count)
        taken, self._pending = self._pending[:count], self._pending[count:]
        return [pair for _, pair in taken]

    def _release(self, emitted: int) -> list[Piece]:
        if not self.stopped:
            self._emitted = emitted
        held_back, self._held_back = self._held_back, ""
        return [(self._kind, held_back)] if held_back else []


class SequenceState:
    """One sample of a request. Only the engine's thread changes it."""

    def __init__(
        self,
        request: Request,
        sample: int,
        seed: int,
        context: int,
        tokenizer: Tokenizer | None,
        listener: Callable[[Event], None] | None,
    ) -> None:
        self.request, self.sample, self.seed = request, sample, seed
        self.tokens = list(request.prompt)  # prompt and reply; the slot shares this list
        self.prompt_length = len(self.tokens)
        self.slot: Slot | None = None
        self.siblings: list[SequenceState] = []  # samples of the same prompt that wait for its prefill
        self.reused_tokens = 0
        self.finish: Finish | None = None
        # Steps are launched ahead. Those launched before a tool call or the end have an older version.
        self.launch_version, self.steps_in_flight = 0, 0
        self._listener, self._streams = listener, listener is not None and request.stream
        max_tokens = request.max_tokens or context
        self._context, self._remaining = context, min(max_tokens, context - self.prompt_length)
        special = tokenizer.special if tokenizer is not None else {}  # not text: a stop string may name one
        named = [special[stop] for stop in request.stop if stop in special]
        self._stop_ids = frozenset([*request.stop_ids, *named])
        self._text_stream = TextStream(tokenizer, request.stop) if tokenizer is not None else None
        self._pieces: list[Piece] = []  # of the whole reply
        self._emitted_pieces = 0
        self._emitted_tokens = self._detokenized = self.prompt_length  # both count from the start of `tokens`
        self._ends_with_stop_token = False
        self.tool = request.tool() if request.tool is not None else None
        self._forced: list[tuple[int, int]] = []  # ranges of `tokens`
        self._logprobs: list[Logprobs] | None = [] if request.logprobs is not None else None
        self._start_time, self._first_token_time = time.perf_counter(), 0.0

    @property
    def remaining_steps(self) -> int:
        """How many more steps can be launched without exceeding the limit: each yields at least one token."""
        return self._remaining - self.steps_in_flight

    @property
    def assigned_slot(self) -> Slot:
        assert self.slot is not None
        return self.slot

    @property
    def uncached_tokens(self) -> int:
        """How many tokens must be prefilled before the last one can be decoded."""
        return len(self.tokens) - 1 - self.assigned_slot.cached_tokens

    def append_sampled(
        self, tokens: Sequence[int], logprobs: Sequence[Logprobs] | None, emit: bool
    ) -> Any | None:
        """Appends the tokens of a step, up to the one that ends the sequence or completes a tool call.

        Returns the tool call, if any. With `emit` false the tokens become part of a later event. The first
        tokens are always emitted at once.
        """
        call = None
        if not self._first_token_time:
            self._first_token_time, emit = time.perf_counter(), True
        for at, token in enumerate(tokens):
            self.tokens.append(token)
            self._remaining -= 1
            if self._logprobs is not None and logprobs is not None:
                self._logprobs.append(logprobs[at])
            if token in self._stop_ids:
                self.finish, self._ends_with_stop_token = "stop", True
                break
            if self._text_stream is not None and self.request.stop:
                self._detokenize()
                if self._text_stream.stopped:
                    self.finish = "stop"
                    break
            if self.tool is not None:
                call = self.tool.push(token)
            if self._remaining == 0:
                self.finish, call = "length", None
                break
            if call is not None:
                break
        if emit and self._streams and self.finish is None:
            self._emit_event()
        return call

    def append_forced(self, tokens: Sequence[int]) -> None:
        """Appends the output of the tool, truncated to the context."""
        tokens = list(tokens[: self._context - len(self.tokens)])
        self._detokenize()
        if self._streams and self._emitted_tokens < len(self.tokens):
            self._emit_event()  # what was sampled before
        self._forced.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self._remaining = min(self._remaining, self._context - len(self.tokens))
        if self._logprobs is not None:
            self._logprobs += [NO_LOGPROBS] * len(tokens)
        self._detokenize(forced=True)
        if self._remaining == 0:
            self.finish = "length"
        if self._streams:
            self._emit_event()

    def end(self, finish: Finish) -> Reply:
        """Ends the sequence and emits its last event."""
        self.finish = finish
        self._detokenize()
        ids = self.tokens[self.prompt_length :]
        if self._text_stream is not None:
            self._pieces += self._text_stream.flush()
        forced = [False] * len(ids)
        for start, stop in self._forced:
            forced[start - self.prompt_length : stop - self.prompt_length] = [True] * (stop - start)
        now = time.perf_counter()
        reply = Reply(
            ids,
            forced,
            join_text(self._pieces),
            finish,
            self.prompt_length,
            self.reused_tokens,
            self._logprobs,
            first_token_s=(self._first_token_time or now) - self._start_time,
            seconds=now - self._start_time,
        )
        if self._listener is not None:
            self._emit_event(reply=reply)
        return reply

    def _detokenize(self, forced: bool = False) -> None:
        """Decodes the tokens that have no text yet: one by one where logprobs go with it, else together."""
        if self._text_stream is None:
            return
        start, end = self._detokenized, len(self.tokens) - self._ends_with_stop_token
        ids, self._detokenized = self.tokens[start:end], end
        if self._listener is None or self._logprobs is None or forced:
            self._pieces += self._text_stream.push(*ids, forced=forced)
            return
        for token, logprobs in zip(ids, self._logprobs[start - self.prompt_length :], strict=False):
            self._pieces += self._text_stream.push(token, logprobs=logprobs)

    def _emit_event(self, reply: Reply | None = None) -> None:
        """Passes what is new since the last event to the listener: tokens, text, logprobs; at the end the reply."""
        assert self._listener is not None
        self._detokenize()
        ids, pieces = self.tokens[self._emitted_tokens :], self._pieces[self._emitted_pieces :]
        self._emitted_tokens, self._emitted_pieces = len(self.tokens), len(self._pieces)
        stream = self._text_stream
        logprobs = stream.take_logprobs(at_end=reply is not None) if stream is not None else []
        forced = sum(stop - start for start, stop in self._forced)
        sampled = len(self.tokens) - self.prompt_length - forced
        self._listener(Event(self.sample, tuple(ids), tuple(pieces), tuple(logprobs), sampled, reply))
