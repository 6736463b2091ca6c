"""Errors in OpenAI's shape, so that its clients raise what they would raise for OpenAI.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

INVALID, RATE, TIMEOUT, SERVER = "invalid_request_error", "rate_limit_error", "timeout_error", "server_error"
TYPES = {408: TIMEOUT, 429: RATE}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.type = TYPES.get(status, INVALID if status < 500 else SERVER)
        self.headers = dict(headers or {})

    @property
    def body(self) -> str:
        """ASCII: a message may quote what is no character."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error})

    def response(self) -> Response:
        return Response(self.body, self.status, self.headers, "application/json")


def timed_out(seconds: float) -> ApiError:
    # Once more would take as long again: the header tells OpenAI's clients not to try.
    return ApiError(
        408,
        f"The answer was not finished after {seconds:g} s: ask for fewer tokens, or when less is going on.",
        code="timeout",
        headers={"x-should-retry": "false"},
    )


def failed() -> ApiError:
    return ApiError(500, "Something broke in the server, and its log says what.", code="internal_error")


def engine_failed() -> ApiError:
    return ApiError(
        503,
        "The engine that writes the answers has failed, and the server's log says why.",
        code="engine_failed",
    )


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Of all that pydantic finds wrong, what says most: other branches of a union fail higher up, or by the type."""
    error = max(errors, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))
    if error["type"] == "json_invalid":
        return ApiError(400, "The body of the request is not valid JSON.", code="invalid_json")
    param = _param(error["loc"])
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {param}", param=param)
    if error["type"] == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param or None)
    if not param:
        return ApiError(
            400,
            "The body must be a JSON object, sent with the header Content-Type: application/json.",
            code="invalid_json",
        )
    problem = error["msg"].removeprefix("Value error, ")
    return ApiError(400, f"Invalid '{param}': {problem}.", param=param or None, code="invalid_value")


def _param(loc: Sequence[int | str]) -> str:
    """('body', 'messages', 0, 'content', 'list[Part]', 1) -> messages[0].content[1]"""
    named = ""
    for at in loc[1:] if loc and loc[0] == "body" else loc:
        if isinstance(at, int):
            named += f"[{at}]"
        elif at.isidentifier() and at not in ("str", "int", "list", "none"):
            named += f".{at}" if named else at
        elif at != str(at) or not any(sign in at for sign in "[(-"):  # a field with an odd name, no type
            named += f".{at[:60]}" if named else at[:60]
    return named
