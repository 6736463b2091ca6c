"""Tool calls in a reply: the model writes code between two special tokens and reads the output.

    ... <|python_start|> 48/2 <|python_end|> <|output_start|> 24 <|output_end|> ...

`ToolState` parses the tokens of one reply as they are sampled. When a call is complete, `push` returns it.
`answer` runs it, which can take seconds and therefore happens in a thread, and returns the tokens to force next.
Detecting a complete call costs one comparison per token, so the decoding loop never waits for a tool. The class
implements the engine's `Tool` protocol (infer/request.py), one object per sample:

    Request(prompt, tool=lambda: ToolState(tokenizer, calculate))

A tool is any function from text to text that raises ToolError, such as `calculate` or `python_tool`. An error
becomes an output that starts with "error:", which the model reads. Everything is bounded: the tokens of a call (a
longer one is closed), the tokens of an output, and the number of calls per reply. Output is encoded as ordinary
text, so nothing that a tool prints can become a special token.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from nanorun.text.tokenizer import Tokenizer
from nanorun.tools.calculator import ToolError, calculate
from nanorun.tools.sandbox import SECONDS, Sandbox, SandboxResult, SandboxUnavailable

__all__ = ["ToolCall", "ToolError", "ToolFunction", "ToolState", "calculate", "python_tool"]

ToolFunction = Callable[[str], str]

MAX_CALLS = 16
MAX_CODE_TOKENS = 1_024
MAX_OUTPUT_TOKENS = 256
_MAX_CHARACTERS_PER_TOKEN = 16  # longer output is truncated before it is encoded


@dataclass(frozen=True)
class ToolCall:
    code: str
    refused: str = ""  # the reason not to run it
    closed: bool = True  # False: it exceeded the limit, and <|python_end|> must be forced


class ToolState:
    """The parser state of one reply. Push the sampled tokens; those that `answer` forces need not be pushed."""

    def __init__(self, tokenizer: Tokenizer, function: ToolFunction = calculate) -> None:
        self._tokenizer, self._function = tokenizer, function
        self._python_start, self._python_end, self._output_start, self._output_end = (
            tokenizer.special[f"<|{at}|>"]
            for at in ("python_start", "python_end", "output_start", "output_end")
        )
        self._calls_left = MAX_CALLS
        self._code: list[int] | None = None  # None: not in a call

    def push(self, token_id: int) -> ToolCall | None:
        """The call that this token completes, or None."""
        if token_id == self._python_start:
            self._code = []  # inside a call, too: the last start counts
            return None
        if self._code is None:
            return None
        if token_id == self._python_end:
            return self._complete()
        if self._tokenizer.is_special(token_id):
            self._code = None  # the reply ends in the middle of a call
            return None
        self._code.append(token_id)
        if len(self._code) > MAX_CODE_TOKENS:
            return self._complete(f"the code is longer than {MAX_CODE_TOKENS} tokens", closed=False)
        return None

    def answer(self, call: ToolCall) -> list[int]:
        """Runs a call and returns the tokens that follow it. Errors become output."""
        return self.result(call, self._run(call))

    def result(self, call: ToolCall, text: str) -> list[int]:
        """The tokens that follow a call with this output."""
        text = text[: _MAX_CHARACTERS_PER_TOKEN * MAX_OUTPUT_TOKENS]
        ids = self._tokenizer.encode(text)[:MAX_OUTPUT_TOKENS]
        ending = [] if call.closed else [self._python_end]
        return [*ending, self._output_start, *ids, self._output_end]

    def _run(self, call: ToolCall) -> str:
        if call.refused:
            return f"error: {call.refused}"
        try:
            return self._function(call.code)
        except ToolError as error:
            return f"error: {error}"

    def _complete(self, refused: str = "", closed: bool = True) -> ToolCall:
        code, self._code = self._tokenizer.decode(self._code or []), None
        if not refused and self._calls_left <= 0:
            refused = f"only {MAX_CALLS} calls are run in a reply"
        self._calls_left -= 1
        return ToolCall(code, refused, closed)


def python_tool(sandbox: Sandbox, *, timeout: float = SECONDS) -> ToolFunction:
    """Runs whole programs and returns what they print. A bare expression goes to the calculator."""

    def run(code: str) -> str:
        with contextlib.suppress(ToolError):
            return calculate(code)
        try:
            result = sandbox.run(code, timeout=timeout)
        except SandboxUnavailable as error:
            raise ToolError(error.problem) from error
        if result.ok or result.reason == "exit code 0":
            return result.stdout.rstrip("\n")
        raise ToolError(_failure(result))

    return run


def _failure(result: SandboxResult) -> str:
    """The last line of the traceback, or the limit that was exceeded."""
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines and result.reason.startswith("exit code") else result.reason
