"""Text in files, as packed sequences of tokens: prepared once, by a builder of TFDS."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import gin
import jax
import numpy as np

from research_dp import types
from research_dp.argument_checks import checked
from research_dp.argument_types import Count, Fraction
from research_dp.data import builders
from research_dp.data.preprocess import Preprocess
from research_dp.data.tfds import data_of, random_access
from research_dp.errors import UsageError, binding_error, some_of

_SAMPLE = 2**16  # bytes at a file's ends that its identity depends on
_AT_ONCE = 1000  # documents
_INSTALL = "pip install 'research_dp[text]'"
_OF_MANY = (".jsonl", ".ndjson", ".parquet", ".arrow")  # files of several documents
_ONE = (
    "is one document, and splits 'train' and 'test' need one each. Write one to each line of a "
    f"file that ends in .jsonl: only {', '.join(_OF_MANY)} have several."
)


@gin.register(module="data")
@checked
def text_data(
    *,
    files: str | Sequence[str] = gin.REQUIRED,
    length: Count = 1024,
    key: str = "text",
    tokenizer: str | None = None,
    end: str | None = None,
    held_out: Fraction = 0.05,
    data_dir: str | None = None,
) -> types.DataSet:
    """Documents of files as packed sequences: arrays `tokens` and `segments`, (length,) int32.

    Documents follow one another. A row has the next `length` tokens, of one document or several,
    which are its segments 1, 2, ...: a token attends to those of its own segment. What is cut at
    the end of a row goes on in the next; the last row of a split is padded with segment 0.

    Args:
        files: Patterns such as 'corpus/*.jsonl'. Of `.jsonl` each line is a document, of `.parquet`
            and `.arrow` (as Hugging Face's datasets saves them) each row, of others each file. A
            folder stands for the `.arrow` files in it. `.jsonl.gz` is decompressed.
        length: Tokens of a row.
        key: Of a document's text, in lines and rows.
        tokenizer: A `tokenizer.json` of Hugging Face's; None: tokens are the bytes of UTF-8.
        end: The text of a token that is put after each document, e.g. '<|endoftext|>'.
        held_out: Share of documents in split 'test', chosen by a hash of their text.
        data_dir: Where the result is kept; None: TFDS's default. It is prepared anew if the files,
            the tokenizer or these options change.

    Raises:
        UsageError: A pattern matches no file, a file or the tokenizer cannot be read, or a split
            has no document.
    """
    patterns = [files] if isinstance(files, str) else files
    paths = [path for pattern in patterns for path in _matched(pattern)]
    encode = encoder(tokenizer, end)
    if held_out in (0, 1):
        raise _no_document(held_out, "train" if held_out else "test", "a share between 0 and 1")
    if len(paths) == 1 and not paths[0].name.removesuffix(".gz").endswith(_OF_MANY):
        raise binding_error("text_data.files", f" = {files!r} {_ONE}")

    def rows(test: bool) -> Iterator[types.Arrays]:
        texts = (text for path in paths for text in documents(path, key))
        own = (text for text in texts if _is_held_out(text, held_out) == test)
        return packed(encode(_some(own, held_out, "test" if test else "train")), length)

    read = [*paths, *([Path(tokenizer).expanduser()] if tokenizer else [])]
    parts = [*map(_identity, read), length, key, bool(tokenizer), end, held_out]
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    offline = importlib.import_module("research_dp.data.offline")  # late: it imports TFDS
    builders.quieten_tfds()
    config = offline.PackedTextConfig(name, length, rows)
    data_dir = builders.folder_of_data(data_dir)
    builder = offline.PackedText(data_dir=data_dir, config=config, file_format="array_record")

    def example(raw: Mapping[str, Any], rng: Any) -> types.Arrays:
        return {name: np.asarray(raw[name], np.int32) for name in ("tokens", "segments")}

    spec = {name: jax.ShapeDtypeStruct((length,), np.int32) for name in ("tokens", "segments")}
    # A published model has more rows than its tokenizer has tokens.
    info = {} if tokenizer else {"vocab_size": 256}
    inputs = Preprocess(spec, info, example, lambda arrays, rows, total, rng: arrays)
    splits = random_access(builder, "train", "test", inputs)
    return data_of(builder, "packed_text", ("train", "test"), inputs, splits, download=True)


def _matched(pattern: str) -> list[Path]:
    """The files of a pattern, in order."""
    found = [Path(name) for name in sorted(glob(str(Path(pattern).expanduser()), recursive=True))]
    each = [sorted(path.glob("**/*.arrow")) if path.is_dir() else [path] for path in found]
    if not (paths := [path for some in each for path in some]):
        raise binding_error("text_data.files", f" = {pattern!r} matches no file.")
    return paths


def _identity(path: Path) -> tuple[str, int, str]:
    """A file's name, size, and a hash of its ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        sample = file.read(_SAMPLE)
        file.seek(max(size - _SAMPLE, 0))
        sample += file.read(_SAMPLE)
    return path.name, size, hashlib.sha256(sample).hexdigest()


def _is_held_out(text: str, share: float) -> bool:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:6]) < share * 2**48


def _some(texts: Iterable[str], held_out: float, split: str) -> Iterator[str]:
    """The texts of a split. UsageError: all are empty, or there is none."""
    found = False
    for text in texts:
        found = found or bool(text)
        yield text
    if not found:
        raise _no_document(held_out, split, "more documents, or a share nearer to 0.5")


def _no_document(held_out: float, split: str, advice: str) -> UsageError:
    problem = f" = {held_out} leaves split {split!r} without a document. Give {advice}."
    return binding_error("text_data.held_out", problem)


def packed(documents: Iterable[Sequence[int]], length: int) -> Iterator[dict[str, np.ndarray]]:
    """Rows of tokens and segments, both (length,) int32, of documents one after the other."""
    row = {name: np.zeros(length, np.int32) for name in ("tokens", "segments")}
    filled = segment = 0
    for document in documents:
        tokens = np.asarray(document, np.int32)
        while len(tokens):
            taken, tokens = np.split(tokens, [min(length - filled, len(tokens))])
            place, segment = slice(filled, filled + len(taken)), segment + 1
            row["tokens"][place], row["segments"][place] = taken, segment
            filled += len(taken)
            if filled == length:
                yield row
                row = {name: np.zeros_like(x) for name, x in row.items()}
                filled = segment = 0
    if filled:
        yield row


def documents(path: Path, key: str) -> Iterator[str]:
    """The texts of a file. UsageError: it cannot be read, or a document has no such text."""
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith((".jsonl", ".ndjson")):
            opened: Any = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rt", encoding="utf-8") as lines:
                rows = (json.loads(line) for line in lines if line.strip())
                yield from (_text(path, row, key, i) for i, row in enumerate(rows))
        elif name.endswith((".parquet", ".arrow")):
            rows = (row for batch in _batches(path, key) for row in batch.to_pylist())
            yield from (_text(path, row, key, i) for i, row in enumerate(rows))
        else:
            yield path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", binding="text_data.files") from error


def _batches(path: Path, key: str) -> Iterator[Any]:
    """Record batches of a file of Apache Arrow, with one column."""
    from pyarrow import ipc, parquet

    if path.suffix == ".parquet":
        yield from parquet.ParquetFile(path).iter_batches(columns=[key])
        return
    with path.open("rb") as file:
        try:
            reader = ipc.open_stream(file)
        except ValueError:  # of the format with random access
            file.seek(0)
            whole = ipc.open_file(file)
            reader = (whole.get_batch(i) for i in range(whole.num_record_batches))
        yield from (batch.select([key]) for batch in reader)


def _text(path: Path, row: Any, key: str, number: int) -> str:
    if isinstance(row, dict) and isinstance(row.get(key), str):
        return row[key]
    has = f"has {some_of(sorted(row), 5)}" if isinstance(row, dict) else "is no object"
    problem = f"{path}: document {number} {has}, and no text {key!r}. Bind text_data.key."
    raise UsageError(problem, binding="text_data.key")


Encode = Callable[[Iterable[str]], Iterator[Sequence[int]]]


def encoder(tokenizer: str | None, end: str | None) -> Encode:
    """Texts -> their tokens, and the token that ends each."""
    if tokenizer is None:
        last = list(end.encode()) if end else []
        return lambda texts: ([*text.encode(errors="replace"), *last] for text in texts)
    known = load_tokenizer(Path(tokenizer).expanduser(), "text_data.tokenizer")
    last = [] if end is None else [known.token_to_id(end)]
    if last == [None]:
        raise binding_error("text_data.end", f" = {end!r} is no token of {tokenizer}.")

    def encode(texts: Iterable[str]) -> Iterator[Sequence[int]]:
        texts = iter(texts)
        while some := list(itertools.islice(texts, _AT_ONCE)):
            for one in known.encode_batch(some, add_special_tokens=False):
                yield [*one.ids, *last]

    return encode


def load_tokenizer(path: Path, binding: str) -> Any:
    """A tokenizer of Hugging Face's package."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(f"{path} needs the package tokenizers: {_INSTALL}.") from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # its errors have no class of their own
        problem = f" = {path} cannot be read: {error}."
        raise binding_error(binding, problem) from error
