"""Errors in OpenAI's format, so that its clients raise the exceptions they would raise for OpenAI.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

TYPES = {408: "timeout_error", 429: "rate_limit_error"}


class ErrorFields(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(BaseModel):
    """OpenAI's error object."""

    error: ErrorFields


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> str:
        """ASCII: a message may quote lone surrogates."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error})

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, "application/json")


def internal_error() -> ApiError:
    return ApiError(500, "Internal server error: see the server's log.", "internal_error")


def engine_failed() -> ApiError:
    return ApiError(503, "The inference engine has failed: see the server's log.", "engine_failed")


def engine_silent() -> ApiError:
    message = "The inference engine does not respond. Try again later."
    return ApiError(503, message, "engine_silent", headers={"Retry-After": "10"})


def not_an_object() -> ApiError:
    needed = "a JSON object, sent with the header Content-Type: application/json"
    return ApiError(400, f"The body must be {needed}.", "invalid_json")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Reports the most specific error: in a union, the other branches fail higher up, or by their type."""
    error = max(errors, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    param = _param(error["loc"])
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param)
    if error["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param)
    if not param:
        return not_an_object()
    if error["type"] == "too_long" and param == "messages":
        count, limit = error["ctx"]["actual_length"], error["ctx"]["max_length"]
        return ApiError(400, f"Too many messages: {count} (at most {limit}).", "too_many_messages", param)
    problem = error["msg"].removeprefix("Value error, ")
    return ApiError(400, f"Invalid '{param}': {problem}.", "invalid_value", param)


def _param(loc: Sequence[int | str]) -> str:
    """('messages', 0, 'content', 'list[Part]', 1) -> messages[0].content[1]"""
    path = ""
    for at in loc:
        if isinstance(at, int):
            path += f"[{at}]"
        elif at not in ("str", "int", "list", "none") and not any(sign in at for sign in "[(-"):  # not a type
            path += f".{at[:60]}" if path else at[:60]
    return path
