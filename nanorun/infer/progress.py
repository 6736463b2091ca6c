"""One sample while it is being made: its tokens, its text, and why it ends.

Text is shown as it becomes certain. A character is held back until its last byte has come, and the end of
the text is held back while it may turn out to be the beginning of a stop string.
"""

import codecs
import time
from collections.abc import Callable, Sequence
from typing import Any

from nanorun.infer.request import Event, Finish, Logprobs, Reply, Request
from nanorun.infer.slots import Slot
from nanorun.text.stream import StreamDecoder, overlap
from nanorun.text.tokenizer import Tokenizer

NO_LOGPROBS = Logprobs(0.0, 0.0)  # of a forced token


class TextStream:
    """Tokens in, text out that is safe to show; `stopped` once a stop string has come."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder, self._stops, self._held = StreamDecoder(tokenizer), stops, ""
        self.stopped = False

    def push(self, *ids: int, forced: bool = False) -> str:
        text = self._held + self._decoder.push(*ids)
        if not self._stops or forced:  # what a tool says stops nothing
            self._held = ""
            return text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """What was held back in vain. A character that never became whole is left out."""
        held, self._held = self._held, ""
        return held


def whole_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The same text when nobody watches, without a last character that is not whole."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(tokenizer.decode_bytes(ids))


class Progress:
    """The engine's thread alone changes it."""

    def __init__(
        self,
        request: Request,
        number: int,
        seed: int,
        context: int,
        tokenizer: Tokenizer | None,
        emit: Callable[[Event], None] | None,
    ) -> None:
        self.request, self.number, self.seed = request, number, seed
        self.ids = list(request.prompt)  # the whole text; the slot shares this list
        self.prompt = len(self.ids)
        self.slot: Slot | None = None
        self.followers: list[Progress] = []  # samples of the same prompt that wait until it has been read
        self.reused = 0
        self.finish: Finish | None = None
        # Steps are launched ahead. Those that were launched before a change of course are of an older epoch.
        self.epoch, self.in_flight = 0, 0
        self._tokenizer, self._emit = tokenizer, emit
        most = request.max_tokens or context
        self._context, self._left = context, min(most, context - self.prompt)
        self._stop_ids = frozenset(request.stop_ids)
        watched = tokenizer is not None and (emit is not None or request.stop)
        self._text = TextStream(tokenizer, request.stop) if watched and tokenizer else None
        self._shown: list[str] = []
        self._fresh: list[str] = []  # text of the next event
        self._shown_to, self._spelled_to = self.prompt, self.prompt  # of `ids`: told in events, made text of
        self._stop_token = False
        self.tool = request.tool() if request.tool is not None else None
        self.forced: list[tuple[int, int]] = []  # from, to: of `ids`
        self.logprobs: list[Logprobs] | None = [] if request.logprobs is not None else None
        self._begin, self._first = time.perf_counter(), 0.0

    @property
    def steps_left(self) -> int:
        """How many more steps can surely be launched: each yields at least one token."""
        return self._left - self.in_flight

    @property
    def placed(self) -> Slot:
        """Its slot, once it has one."""
        assert self.slot is not None
        return self.slot

    @property
    def unread(self) -> int:
        """Tokens that must be read before the last one can be decoded."""
        return len(self.ids) - 1 - self.placed.held

    def take(self, tokens: Sequence[int], logprobs: Sequence[Logprobs] | None, show: bool) -> Any | None:
        """Appends what a step has chosen, up to where the sample ends or calls its tool.

        What is not to be shown yet is part of the next event. The first tokens are shown at once.
        """
        call, taken = None, 0
        if not self._first:
            self._first, show = time.perf_counter(), True
        for token in tokens:
            self.ids.append(token)
            taken += 1
            self._left -= 1
            if token in self._stop_ids:
                self.finish, self._stop_token = "stop", True
                break
            if self._text is not None and self.request.stop:
                self._spell()
                if self._text.stopped:
                    self.finish = "stop"
                    break
            if self.tool is not None:
                call = self.tool.push(token)
            if self._left == 0:
                self.finish, call = "length", None
                break
            if call is not None:
                break
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += logprobs[:taken]
        if show and self._emit is not None and self.finish is None:
            self._show()
        return call

    def force(self, tokens: Sequence[int]) -> None:
        """Appends what the tool has said, as far as there is room."""
        tokens = list(tokens[: self._context - len(self.ids)])
        if self._emit is not None and self._shown_to < len(self.ids):
            self._show()  # what the model has said
        self.forced.append((len(self.ids), len(self.ids) + len(tokens)))
        self.ids += tokens
        self._left = min(self._left, self._context - len(self.ids))
        if self.logprobs is not None:
            self.logprobs += [NO_LOGPROBS] * len(tokens)
        self._spell(forced=True)
        if self._left == 0:
            self.finish = "length"
        if self._emit is not None:
            self._show(forced=True)

    def end(self, finish: Finish) -> Reply:
        """The finished sample, which is also its last event."""
        self.finish = finish
        self._spell()
        if self._text is not None:
            self._fresh.append(self._text.end())
        reply = self._reply(finish)
        if self._emit is not None:
            self._show(reply=reply)
        return reply

    def _reply(self, finish: Finish) -> Reply:
        ids = self.ids[self.prompt :]
        if self._text is not None:
            text = "".join((*self._shown, *self._fresh))
        elif self._tokenizer is not None:
            text = whole_text(self._tokenizer, ids[:-1] if self._stop_token else ids)
        else:
            text = ""
        forced = [False] * len(ids)
        for low, high in self.forced:
            forced[low - self.prompt : high - self.prompt] = [True] * (high - low)
        now = time.perf_counter()
        return Reply(
            ids,
            forced,
            text,
            finish,
            self.prompt,
            self.reused,
            self.logprobs,
            (self._first or now) - self._begin,
            now - self._begin,
        )

    def _spell(self, forced: bool = False) -> None:
        """Makes text of the ids that have none yet: token by token where a stop string may come, else together."""
        if self._text is not None:
            end = len(self.ids) - self._stop_token
            self._fresh.append(self._text.push(*self.ids[self._spelled_to : end], forced=forced))
            self._spelled_to = end

    def _show(self, forced: bool = False, reply: Reply | None = None) -> None:
        assert self._emit is not None
        if reply is None and not forced:
            self._spell()
        text, ids = "".join(self._fresh), self.ids[self._shown_to :]
        logprobs: tuple[Logprobs, ...] = ()
        if self.logprobs is not None and not forced:
            logprobs = tuple(self.logprobs[self._shown_to - self.prompt :])
        self._shown.append(text)
        self._fresh, self._shown_to = [], len(self.ids)
        self._emit(Event(self.number, tuple(ids), forced, text, logprobs, reply))
