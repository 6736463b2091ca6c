"""Tool calls in a reply: the model writes code between two special tokens and reads what came of it.

    ... <|python_start|> 48/2 <|python_end|> <|output_start|> 24 <|output_end|> ...

`ToolState` watches the tokens of one reply as they are sampled. When a call is complete, `push` returns it.
`answer` runs it, which may take seconds, so in a thread, and gives the tokens that the sequence must go on
with. Telling that a call is complete costs a comparison a token, so the decoding loop never waits for a tool.
This is what the engine wants of a `Tool` (request.py), made anew for each sample:

    Request(prompt, tool=lambda: ToolState(tokenizer, calculate))

What runs a call is any function from text to text that raises ToolError, such as `calculate` or
`python_tool`. Whatever goes wrong becomes an output that begins with "error:", and the model reads that.
Everything is bounded: the tokens of a call (one that runs away is ended), the tokens of an output, and the
calls of a reply that are run. Output is encoded as ordinary text, so nothing that a tool prints can become a
special token.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from nanorun.text.tokenizer import Tokenizer
from nanorun.tools.calculator import ToolError, calculate
from nanorun.tools.sandbox import Result, Sandbox, SandboxUnavailable

__all__ = ["Call", "Function", "ToolError", "ToolState", "calculate", "python_tool"]

Function = Callable[[str], str]

MAX_CALLS = 16
MAX_CODE_TOKENS = 1_024
MAX_OUTPUT_TOKENS = 256
_CHARACTERS_A_TOKEN = 16  # text beyond this many for each token allowed is not even encoded


@dataclass(frozen=True)
class Call:
    code: str
    refused: str = ""  # why it must not be run
    closed: bool = True  # False: it was cut off, and <|python_end|> is still to come


class ToolState:
    """Where one reply stands. Push what the model samples; what `answer` forces need not be pushed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        function: Function = calculate,
        *,
        max_calls: int = MAX_CALLS,
        max_code_tokens: int = MAX_CODE_TOKENS,
        max_output_tokens: int = MAX_OUTPUT_TOKENS,
    ) -> None:
        self._tokenizer, self._function = tokenizer, function
        self._python_start, self._python_end = (
            tokenizer.special[f"<|python_{at}|>"] for at in ("start", "end")
        )
        self._output_start, self._output_end = (
            tokenizer.special[f"<|output_{at}|>"] for at in ("start", "end")
        )
        self._max_code, self._max_output = max_code_tokens, max_output_tokens
        self._calls_left = self._max_calls = max_calls
        self._code: list[int] | None = None  # None: not in a call

    def push(self, token_id: int) -> Call | None:
        """The call that this token completes, if it does."""
        if token_id == self._python_start:
            self._code = []  # also inside a call: what the model begins anew, it means anew
            return None
        if self._code is None:
            return None
        if token_id == self._python_end:
            return self._complete()
        if self._tokenizer.is_special(token_id):
            self._code = None  # the reply or the turn ends in the middle of a call
            return None
        self._code.append(token_id)
        if len(self._code) > self._max_code:
            return self._complete(f"the code is longer than {self._max_code} tokens", closed=False)
        return None

    def answer(self, call: Call) -> list[int]:
        """Runs a call: the tokens that follow it, errors included."""
        return self.result(call, self._run(call))

    def result(self, call: Call, text: str) -> list[int]:
        """The tokens that follow a call of which this came, whatever the text says."""
        ids = self._tokenizer.encode(text[: _CHARACTERS_A_TOKEN * self._max_output])[: self._max_output]
        ending = [] if call.closed else [self._python_end]
        return [*ending, self._output_start, *ids, self._output_end]

    def _run(self, call: Call) -> str:
        if call.refused:
            return f"error: {call.refused}"
        try:
            return self._function(call.code)
        except ToolError as error:
            return f"error: {error}"

    def _complete(self, refused: str = "", closed: bool = True) -> Call:
        code, self._code = self._tokenizer.decode(self._code or []), None
        if not refused and self._calls_left <= 0:
            refused = f"only {self._max_calls} calls are run in a reply"
        self._calls_left -= 1
        return Call(code, refused, closed)


def python_tool(sandbox: Sandbox, *, timeout: float = 5.0) -> Function:
    """Runs whole programs and answers with what they print. A bare expression is still calculated."""

    def run(code: str) -> str:
        with contextlib.suppress(ToolError):
            return calculate(code)
        try:
            result = sandbox.run(code, timeout=timeout)
        except SandboxUnavailable as error:
            raise ToolError(error.problem) from error
        if result.ok or result.reason == "exit code 0":
            return result.stdout.rstrip("\n")
        raise ToolError(_what_failed(result))

    return run


def _what_failed(result: Result) -> str:
    """The line of the traceback that names the error, or the limit that was reached."""
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines and result.reason.startswith("exit code") else result.reason
