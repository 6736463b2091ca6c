"""Read documents from a user's files: parquet, jsonl, json, csv or plain text; all but parquet also .gz, .xz or .zst.

Every reader is a generator of non-empty documents, in the order of the file, that holds little more than one document
in memory. Nothing is guessed or repaired: a damaged archive, a line that is not UTF-8 or not JSON, or a missing
column raises a UserError that names the place.

    jsonl    one JSON object per line; lines end at "\\n" only, because texts contain other line separators
    json     one array of objects, read whole; a file that does not begin with "[" is read as jsonl
    csv      a header with the names of the columns, then one record per row, separated by "," or ";" or tabs
    parquet  one document per row
    txt      one document per file; long files are split at blank lines, or at each `separator`
"""

import codecs
import csv
import errno
import gzip
import io
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

from nanorun.console import say
from nanorun.errors import UserError
from nanorun.json_files import MAX_VALUES, JsonError, parse_json

COMPRESSIONS = (".gz", ".xz", ".zst")
KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
}
SUPPORTED = (
    ".parquet, .jsonl, .ndjson, .json, .csv, .txt, .md (all but parquet also compressed: .gz, .xz, .zst)"
)
FOLDER_KINDS = (
    "parquet",
    "jsonl",
    "txt",
)  # a folder's .json and .csv files are seldom text: they must be named
TXT_CUT = 256 * 1024  # a text file without separator is split into documents of about this many bytes
LINE_LIMIT = 1 << 26  # bytes of a line of jsonl or a row of csv; a longer line of txt is read in pieces
ARRAY_LIMIT = 1 << 27  # bytes of a .json file, which is read whole
TXT_PIECE = 1 << 22

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
        if is_folder(path):
            files += _files_below(path)
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


def is_folder(path: Path) -> bool:
    """Whether the path that a user named is a folder. Raises if there is neither a folder nor a file."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"There is no file {path}: check the name and the current folder.") from error
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # a NUL
        raise UserError(f"{str(path)!r:.100} is no name of a file: check it.") from error


def _files_below(folder: Path) -> list[Path]:
    """The supported files below a folder, except hidden ones, sorted. Reports what it skips."""

    def skip(error: OSError) -> None:
        if Path(error.filename) == folder:
            raise UserError(f"Cannot read the folder {folder}: {error.strerror}.") from error
        say(f"skipped the folder {error.filename}, which cannot be read: {error.strerror}")

    below: list[Path] = []
    for place, names, files in os.walk(folder, onerror=skip):
        names[:] = [name for name in names if not name.startswith(".")]
        if not os.access(place, os.X_OK):  # it lists its files, but does not open them
            names.clear()
            skip(PermissionError(errno.EACCES, os.strerror(errno.EACCES), place))
            continue
        below += [Path(place, name) for name in files if not name.startswith(".")]
    below = [path for path in below if path.is_file()]
    readable = sorted(path for path in below if file_kind(path)[0] in FOLDER_KINDS)
    if not readable:
        raise UserError(
            f"The folder {folder} holds no supported file: {SUPPORTED}; name .json and .csv files themselves."
        )
    if others := len(below) - len(readable):
        say(f"in {folder}: skipped {others} file{'s' * (others > 1)} of unsupported kinds")
    if tables := sum(file_kind(path)[0] in ("json", "csv") for path in below):
        say(f"in {folder}: {tables} of them .json or .csv, which are read if you name them")
    return readable


def read_documents(
    path: Path, *, column: str = "text", separator: str | None = None, advance: Advance = lambda n: None
) -> Iterator[str]:
    """Yields the documents of one file. `advance` is called with the number of bytes read since the last call."""
    # The stream is closed here and not when it is freed, because it closes `raw`, whose position is reported.
    with _explained(path), open(path, "rb") as raw, _decompress(raw, path) as stream:
        if file_kind(path)[0] == "txt":
            lines = _text_lines(stream, path)
            texts = _cut(lines) if separator is None else _split(lines, separator)
            documents: Iterator[str] = (text for text in texts if text.strip())
        else:
            documents = _read_column(_records(stream, path, column), path, column)
        reported = 0
        for document in documents:
            here = raw.tell()
            advance(here - reported)
            reported = here
            yield document
        advance(path.stat().st_size - reported)


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """The records of a file, each with its location for error messages: objects, or whatever else JSON holds."""
    with _explained(path), open(path, "rb") as raw, _decompress(raw, path) as stream:
        yield from _records(stream, path)


def check_object(place: str, record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise UserError(f'{place[0].upper()}{place[1:]} is not a JSON object like {{"text": "..."}}: fix it.')
    return record


def _records(stream: Any, path: Path, column: str | None = None) -> Iterator[tuple[str, Any]]:
    """Whole records or, where parquet has the column, that column alone."""
    kind = file_kind(path)[0]
    if kind == "parquet":
        return _parquet_records(stream, path, column)
    if kind == "csv":
        return _csv_records(stream, path)
    if kind == "json":
        return _json_records(stream, path)
    if kind == "jsonl":
        return _jsonl_records(_lines(stream, path), path)
    raise UserError(f"{path} must be .jsonl, .json, .csv (plain, .gz, .xz or .zst) or .parquet: convert it.")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns errors while a file is read into a UserError."""
    try:
        yield
    except OSError as error:
        # gzip and pyarrow report damage as an OSError without errno
        if error.errno is None:
            raise UserError(_damaged(path, error)) from error
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    # ValueErrors are also those of zstd streams, and MemoryErrors of files that claim an absurd size
    except (EOFError, lzma.LZMAError, zlib.error, ValueError, MemoryError) as error:
        raise UserError(_damaged(path, error)) from error


def _damaged(path: Path, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"{path} is damaged or truncated ({reason}): copy or download it again."


def _lines(stream: Any, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(LINE_LIMIT + 1):
        number += 1
        if len(line) > LINE_LIMIT:
            raise UserError(f"Line {number} of {path} is longer than {LINE_LIMIT >> 20} MiB: split it.")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        yield number, line


def _text_lines(stream: Any, path: Path) -> Iterator[str]:
    """The lines of a text; one that is longer than TXT_PIECE bytes in pieces of about that size."""
    number, rest = 1, b""
    while piece := stream.readline(TXT_PIECE):
        if number == 1 and not rest:
            piece = piece.removeprefix(codecs.BOM_UTF8)
        piece, rest = rest + piece, b""
        if not piece.endswith(b"\n"):  # the piece may end inside of a character
            start = next((n for n in (1, 2, 3) if piece[-n:][:1] >= b"\xc0"), 0)
            piece, rest = (piece[:-start], piece[-start:]) if start else (piece, b"")
        yield _text(piece, number, path)
        number += piece.endswith(b"\n")
    if rest:
        yield _text(rest, number, path)


def _decompress(raw: IO[bytes], path: Path) -> Any:
    compression = file_kind(path)[1]
    if compression == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if compression == ".xz":
        return lzma.LZMAFile(raw)
    if compression == ".zst":
        import pyarrow

        compressed = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
        return io.BufferedReader(compressed, 1 << 20)
    return raw


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


def _jsonl_records(lines: Iterable[tuple[int, bytes]], path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in lines:
        if line.strip():
            yield f"line {number} of {path}", _parse_json(_text(line, number, path), path, number)


def _json_records(stream: Any, path: Path) -> Iterator[tuple[str, Any]]:
    content = stream.read(ARRAY_LIMIT + 1).removeprefix(codecs.BOM_UTF8)
    if len(content) > ARRAY_LIMIT:
        raise UserError(f"{path} is larger than {ARRAY_LIMIT >> 20} MiB: convert it to .jsonl, which can be.")
    if not content.lstrip().startswith(b"["):
        yield from _jsonl_records(_lines(io.BytesIO(content), path), path)
        return
    for number, line in _lines(io.BytesIO(content), path):
        _text(line, number, path)  # reports what is not UTF-8
    for number, record in enumerate(_parse_json(content, path), 1):
        yield f"record {number} of {path}", record


def _parse_json(content: str | bytes, path: Path, line: int | None = None) -> Any:
    try:
        return parse_json(content)
    except JsonError as error:
        number = line or error.line or 1
        raise UserError(f"Line {number} of {path} is not JSON ({error.reason}): fix or remove it.") from error


def _csv_records(stream: Any, path: Path) -> Iterator[tuple[str, Any]]:
    size = 0  # of the current row, which may have several lines

    def read_lines() -> Iterator[str]:
        nonlocal size
        for number, line in _lines(stream, path):
            size += len(line)
            if size > LINE_LIMIT or line.count(b",") > MAX_VALUES:
                raise UserError(f"The row at line {number} of {path} is too long: is a quote missing?")
            yield _text(line, number, path)

    lines = read_lines()
    first = next(lines, "")
    csv.field_size_limit(LINE_LIMIT)
    rows = csv.reader(chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        end = rows.line_num
        for row in rows:
            start, end, size = end + 1, rows.line_num, 0
            if row and len(row) != len(header):
                raise UserError(
                    f"Line {start} of {path} has {len(row)} fields, but its header {len(header)}: quote fields with "
                    'separators or line breaks, "like, this".'
                )
            if row:
                yield f"line {start} of {path}", dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise UserError(f"Line {rows.line_num} of {path} is not CSV ({error}): fix or remove it.") from error


def _parquet_records(stream: Any, path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    row = 0
    for records in _parquet_batches(stream, path, column):
        for record in records:
            row += 1
            yield f"row {row} of {path}", record


def _parquet_batches(stream: Any, path: Path, column: str | None) -> Iterator[list[Any]]:
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(stream) as file:
            columns = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=256, columns=columns):
                try:
                    yield batch.to_pylist()
                except UnicodeDecodeError as error:
                    rows = f"rows {row + 1} to {row + len(batch)}"
                    raise UserError(f"A text in {rows} of {path} is not UTF-8: fix or remove it.") from error
                row += len(batch)
    except pyarrow.ArrowException as error:
        raise UserError(_damaged(path, error)) from error


def _read_column(records: Iterator[tuple[str, Any]], path: Path, column: str) -> Iterator[str]:
    for where, record in records:
        record = check_object(where, record)
        if column not in record and "messages" in record:
            raise UserError(
                f"{path} holds conversations ('messages'), but data add takes plain text: choose another file."
            )
        if column not in record:
            have = ", ".join(f"'{name}'" for name in list(record)[:20]) or "none"
            raise UserError(
                f"There is no column '{column}' in {where} (it has {have}): name the text column with --column."
            )
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


def _cut(lines: Iterator[str]) -> Iterator[str]:
    """Documents of about TXT_CUT bytes, cut at a blank line where there is one."""
    held: list[str] = []
    size = 0
    for line in lines:
        if len(line) > 2 * TXT_CUT:  # a file without line breaks: cut after a space where there is one
            yield "".join(held)
            held, size = [], 0
            while len(line) > TXT_CUT:
                at = line.rfind(" ", TXT_CUT // 2, TXT_CUT) + 1 or TXT_CUT
                yield line[:at]
                line = line[at:]
            yield line
            continue
        held.append(line)
        size += len(line.encode())
        if size >= TXT_CUT and (not line.strip() or size >= 2 * TXT_CUT):
            yield "".join(held)
            held, size = [], 0
    yield "".join(held)


def _split(lines: Iterator[str], separator: str) -> Iterator[str]:
    if not separator:
        raise UserError("--split needs at least one character.")
    # a line break in the separator also matches one of Windows (CR LF)
    pattern = re.compile(re.escape(separator).replace("\\\n", "\r?\n"))
    longest = len(separator) + separator.count("\n")
    held = ""
    for line in lines:
        start = max(len(held) - longest + 1, 0)  # a separator can span lines
        held += line
        if pattern.search(held, start):
            *documents, held = pattern.split(held)
            yield from documents
    yield held
