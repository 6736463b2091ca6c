"""The fields of a request: OpenAI's, validated as strictly as OpenAI validates them.

Three kinds of fields: those that are implemented; those that are harmless and ignored (`store`, `user`,
`metadata`...); those that would change the answer and are not supported (`tools`, images, JSON modes, the additive
penalties...), which are rejected unless they have no effect. A name that OpenAI does not have is rejected, except
ours (top_k, min_p, repetition_penalty, truncation, nanorun_parts) and vLLM's continuous_usage_stats.

Each list fails at its first invalid value: a list of errors could be as long as the request.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanorun.infer.request import MAX_STOP_LENGTH, MAX_STOPS, MAX_TOP_LOGPROBS
from nanorun.serve.errors import ApiError

MAX_MESSAGES = 4096
MAX_SEED = 2**63 - 2**20 - 1

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # such as cache_control
    type: Literal["text", "python", "output", "guess"]
    text: str


Parts = Annotated[list[Part], Field(fail_fast=True)]


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")  # other fields of answers: refusal, annotations
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts | None = None
    nanorun_parts: Parts | None = None  # of an answer with a tool call, sent back
    tool_calls: list[Any] | None = None

    @property
    def size(self) -> int:
        """Characters of the content, and one for each part."""
        parts = self.nanorun_parts if self.nanorun_parts is not None else self.content or ""
        return len(parts) + 1 if isinstance(parts, str) else sum(len(part.text) + 1 for part in parts)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk
    include_obfuscation: bool | None = None  # ignored


class Generation(_Strict):
    """The fields that both kinds of completion share."""

    model: Annotated[str, Field(max_length=256)] | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    n: int | None = Field(None, ge=1)  # its limit, which depends on the number of prompts: app.py
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def check(self) -> None:
        """Rejects what is not supported."""
        needless = self.stream_options is not None and not self.stream
        _reject_if(needless, "stream_options", "It is only allowed with stream: true.")
        for name in ("presence_penalty", "frequency_penalty"):
            _reject_if(getattr(self, name), name, "Use repetition_penalty, for example 1.1.")
        _reject_if(self.logit_bias, "logit_bias", "This server does not implement it.")


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = None  # auto: leave out the oldest messages to fit
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: Texts | None = None
    audio: Any = None
    web_search_options: Any = None
    # Ignored:
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def logprobs_per_token(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        only_ours = "The model calls only the tool of the server."
        for name in ("tools", "functions", "audio", "web_search_options"):
            _reject_if(getattr(self, name), name, only_ours)
        _reject_if(self.tool_choice not in (None, "none", "auto"), "tool_choice", only_ours)
        format_type = (self.response_format or {"type": "text"}).get("type")
        _reject_if(format_type != "text", "response_format", "The model generates plain text.")
        _reject_if(self.modalities not in (None, [], ["text"]), "modalities", "The model generates text.")
        needless = self.top_logprobs is not None and not self.logprobs
        _reject_if(needless, "top_logprobs", "It is only allowed with logprobs: true.")


class CompletionRequest(Generation):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def check(self) -> None:
        super().check()
        _reject_if(self.prompt == [], "prompt", "The list is empty: give a text.")
        _reject_if(self.echo, "echo", "This server does not repeat prompts.")
        _reject_if(self.suffix, "suffix", "The model only continues a text.")
        ranks = self.best_of not in (None, self.n or 1)
        _reject_if(ranks, "best_of", "This server returns all samples: use n alone.")


def _reject_if(condition: object, name: str, reason: str) -> None:
    if condition:
        raise ApiError(400, f"Unsupported '{name}': {reason}", "unsupported_parameter", name)
