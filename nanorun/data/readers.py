"""Read documents from a user's files: parquet, jsonl or plain text; the last two plain, .gz, .xz or .zst.

Every reader is a generator of non-empty documents, in the order of the file, that holds little more than one document
in memory. Nothing is guessed or repaired: a damaged archive, a line that is not UTF-8 or not JSON, or a missing
column raises a UserError that names the place.

    jsonl    one JSON object per line; lines end at "\\n" only, because texts contain other line separators
    parquet  one document per row
    txt      one document per file; long files are split at blank lines, or at each `separator`
"""

import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nanorun.console import say
from nanorun.errors import UserError

COMPRESSIONS = (".gz", ".xz", ".zst")
KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
}
SUPPORTED = ".parquet, .jsonl, .ndjson, .txt, .md (all but parquet also compressed: .gz, .xz, .zst)"
TXT_CUT = 256 * 1024  # a text file without separator is split into documents of about this many bytes
LINE_LIMIT = 1 << 29  # longest line and longest document: 512 MiB

Advance = Callable[[int], None]


def file_kind(path: Path) -> tuple[str, str]:
    """('jsonl', '.xz') for 'corpus.jsonl.xz'; ('', '') for an unsupported file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = KINDS.get(suffixes[-1], "") if suffixes else ""
    if not kind or (kind == "parquet" and compression):
        return "", ""
    return kind, compression


def collect_files(paths: list[Path]) -> list[Path]:
    """The files to read: `paths`, with each folder replaced by the supported files below it, sorted by name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = [p for p in sorted(path.rglob("*")) if p.is_file()]
            below = [p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts)]
            readable = [p for p in below if file_kind(p)[0]]
            if not readable:
                raise UserError(f"The folder {path} holds no supported file: {SUPPORTED}.")
            if len(readable) < len(below):
                others = len(below) - len(readable)
                say(f"in {path}: skipped {others} file{'s' * (others > 1)} of unsupported kinds")
            files += readable
        elif not path.exists():
            raise UserError(f"There is no file {path}: check the name and the current folder.")
        elif not file_kind(path)[0]:
            raise UserError(f"{path} has no supported suffix: data add reads {SUPPORTED}.")
        else:
            files.append(path)
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise UserError(f"{path} is named twice: name it once.")
        seen.add(path.resolve())
    return files


def read_documents(
    path: Path, *, column: str = "text", separator: str | None = None, advance: Advance = lambda n: None
) -> Iterator[str]:
    """Yields the documents of one file. `advance` is called with the number of bytes read since the last call."""
    kind, compression = file_kind(path)
    if kind == "parquet":
        yield from _read_parquet(path, column, advance)
        return
    with _explained(path), open(path, "rb") as raw:
        stream = _decompress(raw, compression)  # kept until the end: freed, it would close `raw`
        lines = _lines(stream, path)
        if kind == "jsonl":
            documents = _read_jsonl(lines, path, column)
        else:
            documents = _read_txt(lines, path, separator)
        reported = 0
        for document in documents:
            here = raw.tell()
            advance(here - reported)
            reported = here
            yield document
        advance(raw.tell() - reported)


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a jsonl or parquet file, each with its location for error messages."""
    kind, compression = file_kind(path)
    if kind == "parquet":
        yield from _parquet_records(path)
        return
    if kind != "jsonl":
        raise UserError(f"{path} must be .jsonl (plain, .gz, .xz or .zst) or .parquet: convert it.")
    with _explained(path), open(path, "rb") as raw:
        yield from _json_records(_lines(_decompress(raw, compression), path), path)


def _parquet_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with _open_parquet(path) as file:
        row = 0
        for batch in file.iter_batches(batch_size=256):
            for record in batch.to_pylist():
                row += 1
                yield f"row {row} of {path}", record


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """Turns pyarrow's errors while the file is open into a UserError."""
    import pyarrow
    import pyarrow.parquet

    try:
        # absolute: a relative name with a colon would be parsed as a URI
        with pyarrow.parquet.ParquetFile(path.absolute()) as file:
            yield file
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(_damaged(path, error)) from error


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns errors while a file is read into a UserError."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(_damaged(path, error)) from error
    except OSError as error:
        # gzip and pyarrow report damage as an OSError without errno
        if error.errno is None:
            raise UserError(_damaged(path, error)) from error
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error


def _damaged(path: Path, error: Exception) -> str:
    reason = str(error).strip().rstrip(".") or type(error).__name__
    return f"{path} is damaged or truncated ({reason}): copy or download it again."


def _decompress(raw: IO[bytes], compression: str) -> Any:
    if compression == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if compression == ".xz":
        return lzma.LZMAFile(raw)
    if compression == ".zst":
        import pyarrow

        compressed = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        return io.BufferedReader(compressed, 1 << 20)
    return raw


def _lines(stream: Any, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(LINE_LIMIT + 1):
        number += 1
        if len(line) > LINE_LIMIT:
            raise UserError(f"Line {number} of {path} is longer than {LINE_LIMIT >> 20} MiB: split it.")
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):  # byte order mark
            line = line[3:]
        yield number, line


def _text(line: bytes, number: int, path: Path) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{path} is UTF-16: convert it first with iconv -f utf-16 -t utf-8.") from error
        raise UserError(
            f"Line {number} of {path} is not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}): "
            f"convert the file first, for example with iconv -f latin1 -t utf-8."
        ) from error


def _json_records(lines: Iterator[tuple[int, bytes]], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in lines:
        if not line.strip():
            continue
        try:
            record = json.loads(_text(line, number, path))
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "nested too deeply")
            raise UserError(f"Line {number} of {path} is not JSON ({reason}): fix or remove it.") from error
        if not isinstance(record, dict):
            raise UserError(f'Line {number} of {path} is not a JSON object like {{"text": "..."}}: fix it.')
        yield f"line {number} of {path}", record


def _read_jsonl(lines: Iterator[tuple[int, bytes]], path: Path, column: str) -> Iterator[str]:
    for where, record in _json_records(lines, path):
        if column not in record and "messages" in record:
            raise UserError(
                f"{path} holds conversations ('messages'), but data add takes plain text: choose another file."
            )
        if column not in record:
            raise UserError(_no_column(where, column, list(record)))
        value = record[column]
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise UserError(
                f"'{column}' in {where} is {type(value).__name__}, not text: choose another --column."
            )
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"'{column}' in {where} holds a lone surrogate, which UTF-8 cannot encode: fix or remove it."
            ) from error
        yield value


def _no_column(where: str, column: str, columns: list[str]) -> str:
    have = ", ".join(f"'{name}'" for name in columns[:20]) or "none"
    return f"There is no column '{column}' in {where} (it has {have}): name the text column with --column."


def _read_parquet(path: Path, column: str, advance: Advance) -> Iterator[str]:
    from pyarrow import types

    with _open_parquet(path) as file:
        schema = file.schema_arrow
        if column not in schema.names:
            raise UserError(_no_column(str(path), column, schema.names))
        kind = schema.field(column).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise UserError(f"Column '{column}' of {path} holds {kind}, not text: choose another --column.")
        row = 0
        groups = max(file.num_row_groups, 1)
        size = path.stat().st_size
        for group in range(file.num_row_groups):
            try:
                for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[column]):
                    for value in batch.column(0):
                        text = value.as_py()
                        row += 1
                        if text:
                            yield text
            except UnicodeDecodeError as error:
                raise UserError(f"Row {row + 1} of {path} is not UTF-8: fix or remove it.") from error
            advance(size * (group + 1) // groups - size * group // groups)


def _read_txt(lines: Iterator[tuple[int, bytes]], path: Path, separator: str | None) -> Iterator[str]:
    if separator is not None:
        yield from _split_at(lines, path, separator)
        return
    parts: list[str] = []
    held = 0
    for number, line in lines:
        text = _text(line, number, path)
        if len(text) > 2 * TXT_CUT:  # a file without line breaks
            yield from _whole(parts)
            parts, held = [], 0
            for piece in _cut_line(text):
                yield from _whole([piece])
            continue
        parts.append(text)
        held += len(line)
        if held >= TXT_CUT and (not line.strip() or held >= 2 * TXT_CUT):
            yield from _whole(parts)
            parts, held = [], 0
    yield from _whole(parts)


def _cut_line(text: str) -> Iterator[str]:
    """Splits into at most TXT_CUT characters, after a space where there is one."""
    while len(text) > TXT_CUT:
        at = text.rfind(" ", TXT_CUT // 2, TXT_CUT) + 1 or TXT_CUT
        yield text[:at]
        text = text[at:]
    yield text


def _split_at(lines: Iterator[tuple[int, bytes]], path: Path, separator: str) -> Iterator[str]:
    if not separator:
        raise UserError("--split needs at least one character.")
    # a line break in the separator also matches one of Windows (CR LF)
    pattern = re.compile(re.escape(separator).replace("\\\n", "\r?\n"))
    longest = len(separator) + separator.count("\n")
    held = ""
    for number, line in lines:
        start = max(len(held) - longest + 1, 0)  # a separator can span lines
        held += _text(line, number, path)
        found = pattern.search(held, start)
        while found:
            yield from _whole([held[: found.start()]])
            held = held[found.end() :]
            found = pattern.search(held)
    yield from _whole([held])


def _whole(parts: list[str]) -> Iterator[str]:
    text = "".join(parts)
    if text.strip():
        yield text
