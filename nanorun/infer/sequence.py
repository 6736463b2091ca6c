"""One sequence while it is generated: its tokens, its text, and its finish reason.

Text is emitted once it is final. An incomplete UTF-8 character is held back until its last byte has arrived, and
the end of the text is held back while it may be the beginning of a stop string.
"""

import codecs
import time
from collections.abc import Callable, Sequence
from typing import Any

from nanorun.infer.cache import Slot
from nanorun.infer.request import Event, Finish, Logprobs, Reply, Request
from nanorun.text.stream import overlap
from nanorun.text.tokenizer import Tokenizer

NO_LOGPROBS = Logprobs(0.0, 0.0)  # of a forced token


class TextStream:
    """Incremental detokenization: tokens in, final text out; `stopped` once a stop string has appeared."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops, self._held_back = tokenizer, stops, ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.stopped = False

    def push(self, *ids: int, forced: bool = False) -> str:
        text = self._held_back + self._utf8.decode(self._tokenizer.decode_bytes(ids))
        if not self._stops or forced:  # a tool's output is not searched for stop strings
            self._held_back = ""
            return text
        matches = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if matches:
            self.stopped, self._held_back = True, ""
            return text[: min(matches)]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """The text that was held back for a stop string. An incomplete character is dropped."""
        held_back, self._held_back = self._held_back, ""
        return held_back


class SequenceState:
    """One sample of a request. Only the engine's thread changes it."""

    def __init__(
        self,
        request: Request,
        sample: int,
        seed: int,
        context: int,
        tokenizer: Tokenizer | None,
        emit: Callable[[Event], None] | None,
    ) -> None:
        self.request, self.sample, self.seed = request, sample, seed
        self.tokens = list(request.prompt)  # prompt and reply; the slot shares this list
        self.prompt_length = len(self.tokens)
        self.slot: Slot | None = None
        self.siblings: list[SequenceState] = []  # samples of the same prompt that wait for its prefill
        self.reused_tokens = 0
        self.finish: Finish | None = None
        # Steps are launched ahead. Those launched before a tool call or the end belong to an older epoch.
        self.epoch, self.steps_in_flight = 0, 0
        self._tokenizer, self._emit = tokenizer, emit
        max_tokens = request.max_tokens or context
        self._context, self._remaining = context, min(max_tokens, context - self.prompt_length)
        self._stop_ids = frozenset(request.stop_ids)
        streams_text = tokenizer is not None and (emit is not None or request.stop)
        self._text_stream = TextStream(tokenizer, request.stop) if streams_text and tokenizer else None
        self._emitted_text: list[str] = []
        self._pending_text: list[str] = []  # of the next event
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
        call, appended = None, 0
        if not self._first_token_time:
            self._first_token_time, emit = time.perf_counter(), True
        for token in tokens:
            self.tokens.append(token)
            appended += 1
            self._remaining -= 1
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
        if self._logprobs is not None and logprobs is not None:
            self._logprobs += logprobs[:appended]
        if emit and self._emit is not None and self.finish is None:
            self._emit_event()
        return call

    def append_forced(self, tokens: Sequence[int]) -> None:
        """Appends the output of the tool, truncated to the context."""
        tokens = list(tokens[: self._context - len(self.tokens)])
        if self._emit is not None and self._emitted_tokens < len(self.tokens):
            self._emit_event()  # what was sampled before
        self._forced.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self._remaining = min(self._remaining, self._context - len(self.tokens))
        if self._logprobs is not None:
            self._logprobs += [NO_LOGPROBS] * len(tokens)
        self._detokenize(forced=True)
        if self._remaining == 0:
            self.finish = "length"
        if self._emit is not None:
            self._emit_event(forced=True)

    def end(self, finish: Finish) -> Reply:
        """Ends the sequence and emits its last event."""
        self.finish = finish
        self._detokenize()
        ids = self.tokens[self.prompt_length :]
        text = ""
        if self._text_stream is not None:
            self._pending_text.append(self._text_stream.end())
            text = "".join((*self._emitted_text, *self._pending_text))
        elif self._tokenizer is not None:
            text = TextStream(self._tokenizer, ()).push(*(ids[:-1] if self._ends_with_stop_token else ids))
        forced = [False] * len(ids)
        for start, stop in self._forced:
            forced[start - self.prompt_length : stop - self.prompt_length] = [True] * (stop - start)
        now = time.perf_counter()
        reply = Reply(
            ids,
            forced,
            text,
            finish,
            self.prompt_length,
            self.reused_tokens,
            self._logprobs,
            first_token_s=(self._first_token_time or now) - self._start_time,
            seconds=now - self._start_time,
        )
        if self._emit is not None:
            self._emit_event(reply=reply)
        return reply

    def _detokenize(self, forced: bool = False) -> None:
        """Pushes new tokens to the text stream: one by one where stop strings are searched, else together."""
        if self._text_stream is not None:
            end = len(self.tokens) - self._ends_with_stop_token
            text = self._text_stream.push(*self.tokens[self._detokenized : end], forced=forced)
            self._pending_text.append(text)
            self._detokenized = end

    def _emit_event(self, forced: bool = False, reply: Reply | None = None) -> None:
        assert self._emit is not None
        if reply is None and not forced:
            self._detokenize()
        text, ids = "".join(self._pending_text), self.tokens[self._emitted_tokens :]
        logprobs: tuple[Logprobs, ...] = ()
        if self._logprobs is not None and not forced:
            logprobs = tuple(self._logprobs[self._emitted_tokens - self.prompt_length :])
        self._emitted_text.append(text)
        self._pending_text, self._emitted_tokens = [], len(self.tokens)
        self._emit(Event(self.sample, tuple(ids), forced, text, logprobs, reply))
