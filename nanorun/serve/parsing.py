"""The body of a request as validated fields, in bounded time.

Bodies are parsed in the event loop, where every other client waits for them. Their cost depends on the number of
values rather than of bytes: two megabytes may be one text, or 700,000 lists that are invalid one by one. So the values
are counted before the parser sees them, and validation stops at the first error of a list (schema.py).
"""

import contextlib
import gc
import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import ValidationError

from nanorun.serve.errors import ApiError, from_validation
from nanorun.serve.schema import Generation

MAX_VALUES = 50_000  # about 50 ms
MAX_KEYS = 1_024  # of one object: each unknown one is an error
MAX_DIGITS = 400  # of an integer, which is converted in quadratic time

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

Body = TypeVar("Body", bound=Generation)


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Raises an `ApiError` for a body that is not JSON within the limits, or has invalid or unsupported fields."""
    try:
        text = data.decode("utf-8-sig")
        _check_values(text)
        with _without_collections():
            body = kind.model_validate(_decoder.decode(text))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise from_validation(errors) from None
    except RecursionError:
        raise _invalid("The body of the request is nested too deeply.") from None
    except ValueError:
        raise _invalid("The body of the request is not valid JSON.") from None
    body.check()
    return body


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """The garbage collector would visit the new values again and again, and all connections with them, for nothing:
    they form no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_values(text: str) -> None:
    """Every value follows a comma or the start of a list or an object, except the first."""
    if sum(map(text.count, ",[{")) < MAX_VALUES:  # commas inside texts included
        return
    structure, strings = _STRING.subn("", text, count=2 * MAX_VALUES)  # a string is a value or its key
    if strings == 2 * MAX_VALUES or sum(map(structure.count, ",[{")) >= MAX_VALUES:
        raise _too_large(f"The request has more than {MAX_VALUES} JSON values.")


def _check_keys(value: dict[str, Any]) -> dict[str, Any]:
    if len(value) > MAX_KEYS:
        raise _too_large(f"An object of the request has {len(value)} keys (at most {MAX_KEYS}).")
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _too_large(f"An integer of the request has {len(digits)} digits (at most {MAX_DIGITS}).")
    return int(digits)


_decoder = json.JSONDecoder(object_hook=_check_keys, parse_int=_parse_int)


def _too_large(message: str) -> ApiError:
    return ApiError(400, message, "too_many_values")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, "invalid_json")
