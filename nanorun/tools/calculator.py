"""The calculator tool: one expression in, its value as text out.

It supports arithmetic, comparisons, strings with a few of their methods, and a few functions. Python's parser
builds the syntax tree; the evaluator walks it and accepts only the nodes listed here, so no attribute, name or call
reaches Python's own `eval`. The language has no loops, so the work is at most the number of nodes times the most
expensive operation, and every operation that can grow its operands (`*`, `**`, `+`, replace, join) checks the size
of its result before it computes it.

Values are ints of at most 1,024 bits, finite floats, booleans, strings, and lists of those.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

MAX_TEXT = 1_000  # characters of an expression
MAX_NODES = 400
MAX_DEPTH = 64
MAX_BITS = 1_024  # of an integer
MAX_SIZE = 4_000  # characters of a string; of a list, the sizes of its items and one more for each
MAX_BRACKETS = 40  # the parser is slow to reject some deep nestings

_UNKNOWN, _TOO_LARGE = "not an expression the calculator knows", "too large"
# Without letters there are no calls, so a comma can only be a thousands separator.
_PLAIN_ARITHMETIC = re.compile(r"[\d\s.,()+\-*/%<>=!]*")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# Unknown escapes, and keywords directly after a number: Python's parser would print warnings.
_WARNED = re.compile(r"\\|\b\d[\w.]*(?:and|else|for|if|in|is|not|or)\b")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})


class ToolError(Exception):
    """Why a tool has no result, in a few words that the model reads."""


def calculate(text: str) -> str:
    """The value of one expression, or ToolError. Returns within milliseconds for any text."""
    text = text.strip().removesuffix("=").rstrip()
    if len(text) > MAX_TEXT:
        raise ToolError("too long")
    if _PLAIN_ARITHMETIC.fullmatch(text.translate(_SIGNS)):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text.translate(_SIGNS))
    try:
        return _show(_value(_parse(text)))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (OverflowError, RecursionError):
        raise ToolError(_TOO_LARGE) from None
    except IndexError:
        raise ToolError("index out of range") from None
    except (TypeError, ValueError) as error:
        raise ToolError(str(error)[:100] or "not the right kind of value") from None


def _parse(text: str) -> ast.expr:
    if _WARNED.search(text) or sum(map(text.count, "([{")) > MAX_BRACKETS:
        raise ToolError(_UNKNOWN)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(_UNKNOWN) from None
    level: list[ast.AST] = [tree]
    nodes = depth = 0
    while level:
        nodes, depth = nodes + len(level), depth + 1
        if nodes > MAX_NODES or depth > MAX_DEPTH:
            raise ToolError(_TOO_LARGE)
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return tree


def _value(node: ast.expr) -> Any:
    """The value of a node, within the limits."""
    return _checked(_evaluate(node))


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.List(elts=items):
            elements = [_value(item) for item in items]
            if not any(isinstance(element, list) for element in elements):
                return elements
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.BoolOp(op=op, values=operands):
            stops_at = isinstance(op, ast.Or)
            for operand in operands:
                value = _value(operand)
                if bool(value) is stops_at:
                    break
            return value
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(type(op) in _COMPARE for op in ops):
            values = [_value(operand) for operand in (left, *rights)]
            pairs = zip(ops, values, values[1:], strict=False)
            return all(_COMPARE[type(op)](a, b) for op, a, b in pairs)
        case ast.Subscript(value=inner, slice=index):
            return _text_or_list(_value(inner))[_index(index)]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, args))
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=args, keywords=[]) if name in _METHODS:
            return _method(_value(inner), name, [_value(arg) for arg in args])
    raise ToolError(_UNKNOWN)


def _index(node: ast.expr) -> Any:
    if isinstance(node, ast.Slice):
        return slice(
            *(None if part is None else _value(part) for part in (node.lower, node.upper, node.step))
        )
    return _value(node)


# -- limits ------------------------------------------------------------------------------------------


def _checked(value: Any) -> Any:
    if isinstance(value, complex) or value != value:
        raise ToolError("not a real number")
    if isinstance(value, float) and math.isinf(value):
        raise ToolError(_TOO_LARGE)
    if isinstance(value, int):
        _bound(value.bit_length(), MAX_BITS)
    elif isinstance(value, str | list):
        _bound(_size(value), MAX_SIZE)
    return value


def _bound(size: int, limit: int) -> None:
    if size > limit:
        raise ToolError(_TOO_LARGE)


def _size(value: Any) -> int:
    if isinstance(value, list):
        return len(value) + sum(map(_size, value))
    return len(value) if isinstance(value, str) else 1


def _text_or_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise TypeError
    return value


def _numbers(*values: Any) -> None:
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError


# -- operators ---------------------------------------------------------------------------------------


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, str | list):
        _bound(_size(a) + _size(b), MAX_SIZE)
    return a + b


def _multiply(a: Any, b: Any) -> Any:
    if isinstance(b, str):
        a, b = b, a
    if isinstance(a, str):
        if isinstance(b, int):
            _bound(len(a) * b, MAX_SIZE)
        return a * b
    _numbers(a, b)  # refuses a list, which * would repeat
    return a * b  # at most twice the bits


def _power(a: Any, b: Any) -> Any:
    _numbers(a, b)
    if isinstance(a, int) and isinstance(b, int) and b > 0 and abs(a) > 1:
        _bound((abs(a).bit_length() - 1) * b, MAX_BITS)
    return a**b


def _modulo(a: Any, b: Any) -> Any:
    _numbers(a, b)  # `%` on a string would format it
    return a % b


_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: _add,
    ast.Sub: operator.sub,
    ast.Mult: _multiply,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _modulo,
    ast.Pow: _power,
}
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in _text_or_list(b),
    ast.NotIn: lambda a, b: a not in _text_or_list(b),
}

# -- functions and methods ---------------------------------------------------------------------------


def _round(value: Any, digits: int = 0) -> Any:
    _numbers(value, digits)
    _bound(abs(digits), 300)  # Python computes ten to that power
    return round(value, digits) if digits else round(value)


def _numeral(value: Any) -> Any:
    if isinstance(value, str):
        _bound(len(value), 310)
    return value


def _method(value: Any, name: str, args: list[Any]) -> Any:
    _text_or_list(value)
    if isinstance(value, list) and name not in ("count", "index"):
        raise ToolError(_UNKNOWN)
    if name == "replace" and len(args) > 1:
        old, new = args[:2]
        _bound(len(value) + value.count(old) * max(0, len(new) - len(old)), MAX_SIZE)
    if name == "join" and args:
        _bound(len(value) * len(args[0]) + sum(map(_size, args[0])), MAX_SIZE)
    return getattr(value, name)(*args)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "float": lambda value: float(_numeral(value)),
    "int": lambda value: int(_numeral(value)),
    "len": len,
    "list": lambda value: list(_text_or_list(value)),
    "max": max,
    "min": min,
    "reversed": lambda value: _text_or_list(value)[::-1],
    "round": _round,
    "sorted": sorted,
    "sqrt": math.sqrt,
    "str": str,
    "sum": sum,
}
# String methods whose result is at most a small multiple of the string; replace and join are checked above.
_METHODS = frozenset(
    "capitalize count endswith find index isalnum isalpha isdigit islower isspace isupper join lower lstrip "
    "replace rfind rindex rstrip split startswith strip swapcase title upper".split()
)

# -- the output --------------------------------------------------------------------------------------


def _show(value: Any) -> str:
    """Like Python's print, but an integral float has no `.0`, and others have 12 significant digits."""
    if isinstance(value, float) and not value.is_integer():
        value = float(f"{value:.12g}")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    shown = str(value)
    _bound(len(shown), MAX_SIZE)
    return shown
