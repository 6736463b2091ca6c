"""Mutations of valid inputs: of bytes, and of the structure of JSON. The same dice make the same input."""

import json
import random
from typing import Any

NUMBERS = (
    *(0, -1, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e308),
)
TEXTS = (
    *("", " ", "0", "x" * 300, "\ud800", "\0", "a\nb", "../x", "/etc/passwd", "\x1b]0;x\x07", "東京🙂"),
    *("NaN", "true"),
)
TOKENS = (
    *(b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"null", b"NaN", b"1e999", b"-", b"\xff", b"\0"),
    *(b"\r\n", b" "),
)


def mutate_bytes(dice: random.Random, content: bytes) -> bytes:
    """One to four small changes anywhere."""
    edited = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 4))):
        at, kind = dice.randrange(len(edited) + 1), dice.randrange(9)
        end = min(at + dice.choice((1, 2, 4, 8, 64, 1024)), len(edited))
        if kind == 0 and at < len(edited):
            edited[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and at < len(edited):
            edited[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
        elif kind == 2:
            edited[at:at] = dice.choice(TOKENS) * dice.choice((1, 1, 2, 100))
        elif kind == 3:
            del edited[at:end]
        elif kind == 4:
            del edited[at:]
        elif kind == 5:
            edited[at:at] = edited[at:end] * dice.choice((1, 2, 50))
        elif kind == 6:
            edited[at:end] = dice.randbytes(end - at)
        elif kind == 7 and end - at >= 4:
            edited[at : at + 4] = dice.choice((0, 1, -1, 2**31 - 1, -(2**31))).to_bytes(
                4, "little", signed=True
            )
        else:
            other = dice.randrange(len(edited) + 1)
            edited[at:at] = edited[other : other + end - at]
    return bytes(edited)


def mutate_json(dice: random.Random, value: Any) -> bytes:
    """Valid JSON, and seldom not quite, with one to four values changed, moved, removed or added."""
    value = json.loads(json.dumps(value))
    for _ in range(dice.choice((1, 1, 1, 2, 3, 4))):
        value = _edit(dice, value)
    text = json.dumps(value, ensure_ascii=dice.random() < 0.8, indent=dice.choice((None, 1)))
    content = text.encode("utf-8", "surrogatepass")
    if dice.random() < 0.01:  # what no writer would write
        deep = b"[" * dice.choice((100, 10_000, 200_000))
        content = content.replace(b":", b":" + deep, 1) if dice.random() < 0.5 else deep
    return content


def _edit(dice: random.Random, value: Any) -> Any:
    """Follows a random path and changes what is at its end."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(list(value))
        kind = dice.randrange(12)
        if kind == 0:
            del value[key]
        elif kind == 1:
            value[dice.choice(TEXTS)] = value.pop(key)
        elif kind == 2:
            value[dice.choice(TEXTS)] = odd_value(dice)
        else:
            value[key] = _edit(dice, value[key])
        return value
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        kind = dice.randrange(8)
        if kind == 0:
            del value[at]
        elif kind == 1:
            value[at:at] = _copies(value[at], dice.choice((1, 2, 1000)))
        elif kind == 2:
            value.insert(at, odd_value(dice))
        else:
            value[at] = _edit(dice, value[at])
        return value
    if isinstance(value, str) and dice.random() < 0.4:
        return (
            value[: dice.randrange(len(value) + 1)]
            + dice.choice(TEXTS)
            + value[dice.randrange(len(value) + 1) :]
        )
    if isinstance(value, int | float) and not isinstance(value, bool) and dice.random() < 0.4:
        return dice.choice((-value, value + 1, value * 1000, str(value), value // 2, bool(value)))
    return odd_value(dice, value)


def _copies(value: Any, count: int) -> list[Any]:
    """Copies, so that the next edit changes one of them. What is large, since it was repeated before, is None."""
    text = json.dumps(value)
    return [json.loads(text) if len(text) < 1000 else None for _ in range(count)]


def odd_value(dice: random.Random, old: Any = None) -> Any:
    kind, old = dice.randrange(10), _copies(old, 1)[0]
    if kind < 3:
        return dice.choice(NUMBERS)
    if kind < 5:
        return dice.choice(TEXTS)
    if kind == 5:
        return dice.choice((None, True, False, float("nan"), float("inf")))
    if kind == 6:
        return _copies(old, dice.choice((0, 1, 2, 300)))
    if kind == 7:
        return {dice.choice(TEXTS): old}
    if kind == 8:
        for _ in range(dice.choice((2, 10, 70))):
            old = [old]
        return old
    return dice.choice(([], {}, [[]], [{}], {"a": {}}))
