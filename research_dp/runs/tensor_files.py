"""Safetensors files, and rows that say which of their tensors a parameter is made of.

Hugging Face's layout: a folder with one file, or with several and an index. Both directions, from
tensors to parameters and back, read the same rows.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from research_dp.errors import UsageError, printable, some_of
from research_dp.runs.manifest import Damaged

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_UNNAMED = ".unnamed"  # of a file, until their number is known
_ROWS = 4096  # of tables that are compared at a time
_FILE_BYTES = 5 * 10**9  # of a file, as Hugging Face writes them
# Buffers of old files, which are no weights.
_BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
_MOST = 5


class Row(NamedTuple):
    """A parameter here, and the tensors that it is made of.

    Attributes:
        path: Of the parameter, such as 'blocks/qkv/kernel'.
        names: Of the tensors, which are joined along the last dim. A '*' is the number of a layer:
            layers are stacked along a new first dim.
        transposed: Whether the last two dims of each tensor change places before.
        sizes: The last dims of what is joined; None: they are equal.
    """

    path: str
    names: str | Sequence[str]
    transposed: bool = False
    sizes: Sequence[int] | None = None

    @property
    def parts(self) -> Sequence[str]:
        """`names`, as a sequence."""
        return [self.names] if isinstance(self.names, str) else self.names

    @property
    def stacked(self) -> bool:
        """Whether it is of several layers."""
        return "*" in self.parts[0]


# ---- Tensors of files, and what rows make of them ----


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, of which only what is asked for is read.

    The file is opened each time: what stays mapped counts as this process's memory.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str  # as the file names its dtype

    def __getitem__(self, spans: tuple[slice, ...]) -> np.ndarray:
        from safetensors import safe_open

        with safe_open(self.file, framework="numpy") as file:
            try:
                return file.get_slice(self.name)[spans]
            except (AttributeError, TypeError) as error:  # NumPy has no such dtype
                problem = f"{printable(self.name)} is {self.kind}, which NumPy lacks"
                raise Damaged(problem) from error


@dataclasses.dataclass(frozen=True)
class Joined:
    """What a row makes of tensors: (layers, ...) of those of each layer, or one layer's."""

    row: Row
    layers: Sequence[Sequence[Tensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        *before, _ = self.shape_of(self.layers[0][0])
        last = sum(self.shape_of(x)[-1] for x in self.layers[0])
        return (*([len(self.layers)] if self.row.stacked else []), *before, last)

    def shape_of(self, x: Tensor) -> tuple[int, ...]:
        """Of a tensor, as it is joined."""
        return (*x.shape[:-2], *x.shape[:-3:-1]) if self.row.transposed else x.shape

    def __getitem__(self, spans: tuple[slice, ...]) -> np.ndarray:
        if not self.row.stacked:
            return self._of_layer(self.layers[0], spans)
        layers = self.layers[spans[0]]
        first = self._of_layer(layers[0], spans[1:])
        stack = np.empty((len(layers), *first.shape), first.dtype)
        stack[0] = first
        for number, parts in enumerate(layers[1:], 1):
            stack[number] = self._of_layer(parts, spans[1:])
        return stack

    def _of_layer(self, parts: Sequence[Tensor], spans: tuple[slice, ...]) -> np.ndarray:
        *before, last = spans
        found, start = [], 0
        for x in parts:
            size = self.shape_of(x)[-1]
            own = slice(max(last.start - start, 0), min(last.stop - start, size))
            if own.start < own.stop:
                found.append(self._cut(x, (*before, own)))
            start += size
        return np.concatenate(found, -1) if len(found) > 1 else found[0]

    def _cut(self, x: Tensor, spans: tuple[slice, ...]) -> np.ndarray:
        if not self.row.transposed:
            return x[spans]
        return np.swapaxes(x[(*spans[:-2], *spans[:-3:-1])], -1, -2)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name. Raises Damaged, or OSError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Tensor(path, name, tuple(x.get_shape()), x.get_dtype())
                for name, x in slices.items()
            }
    except SafetensorError as error:
        raise Damaged(f"{path.name}: {printable(str(error))}") from error


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Those of a folder's one file, or else of its index. Raises Damaged, or OSError."""
    if (folder / WEIGHTS).is_file():
        return tensors_of(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise Damaged(f"it has neither {WEIGHTS} nor {INDEX}")
    try:
        named = json.loads((folder / INDEX).read_text())["weight_map"]
        files = sorted({str(name) for name in named.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{INDEX} is no index of tensors: {printable(str(error))}") from error
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise Damaged(f"{INDEX} names {some_of(absent, _MOST)}, which is not in it")
    found = {k: x for file in files for k, x in tensors_of(folder / file).items()}
    if absent := sorted(named.keys() - found.keys()):
        raise Damaged(f"{some_of(absent, _MOST)} of {INDEX} is in no file")
    return found


def joined(
    rows: Sequence[Row],
    tensors: Mapping[str, Tensor],
    skipped: Callable[[str], bool],
) -> dict[str, Joined]:
    """Parameters by path; those that are skipped may be missing.

    Raises:
        Damaged: Tensors are missing, or left over, or do not fit together: all of them are named.
    """
    made: dict[str, Joined] = {}
    taken: set[str] = set()
    absent: list[str] = []
    misfits: list[str] = []
    for row in rows:
        layers = [row.parts]
        if row.stacked:
            count = _layers(row, tensors)
            layers = [[name.replace("*", str(i)) for name in row.parts] for i in range(count)]
        names = [name for parts in layers for name in parts]
        taken.update(names)
        if missing := [name for name in names if name not in tensors]:
            absent += [] if skipped(row.path) else missing
            continue
        found = Joined(row, [[tensors[name] for name in parts] for parts in layers])
        if odd := _odd(found):
            misfits += [f"{x.name} {x.kind} {x.shape}" for x in odd]
        else:
            made[row.path] = found
    left = [name for name in tensors if name not in taken and not _BUFFERS.fullmatch(name)]
    left = [name for name in left if not _is_embedding_again(name, tensors)]
    problems = {
        "it lacks {}": absent,
        "no row takes {}": left,
        "shapes or dtypes do not fit: {}": misfits,
    }
    if said := [text.format(some_of(x, _MOST)) for text, x in problems.items() if x]:
        raise Damaged("; ".join(said))
    return made


def _odd(found: Joined) -> list[Tensor]:
    """Tensors that are unlike those of the first layer, or those that do not fit together."""
    row, first = found.row, found.layers[0]
    if any(len(x.shape) < 1 + row.transposed for x in first):
        return list(first)
    likes = [(x.shape, x.kind) for x in first]
    odd = [
        x
        for parts in found.layers
        for x, like in zip(parts, likes, strict=True)
        if (x.shape, x.kind) != like
    ]
    lasts = [found.shape_of(x)[-1] for x in first]
    same = {(found.shape_of(x)[:-1], x.kind) for x in first}
    fit = len(same) == 1 and lasts == list(row.sizes or lasts[:1] * len(lasts))
    return odd if fit else [*odd, *first]


def _layers(row: Row, tensors: Mapping[str, Tensor]) -> int:
    """How many layers there are of a row: one more than the largest number, and at least one."""
    patterns = [re.compile(re.escape(name).replace(r"\*", r"(\d+)")) for name in row.parts]
    found = (pattern.fullmatch(name) for pattern in patterns for name in tensors)
    return 1 + max((int(match[1]) for match in found if match), default=0)


def _is_embedding_again(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether it is a head that is tied, and equal to the embedding."""
    tied = ("model.embed_tokens.weight", "transformer.wte.weight")
    others = [tensors[x] for x in tied if x in tensors]
    if name != "lm_head.weight" or not others or others[0].shape != tensors[name].shape:
        return False
    rows, width = others[0].shape
    for start in range(0, rows, _ROWS):
        part = slice(start, min(start + _ROWS, rows)), slice(0, width)
        if others[0][part].tobytes() != tensors[name][part].tobytes():
            return False
    return True


def check(rows: Sequence[Row], paths: Collection[str]) -> None:
    """UsageError: rows and parameters are not of the same model."""
    if problems := sorted({row.path for row in rows} ^ set(paths)):
        raise UsageError(f"rows and parameters are not of the same model: {some_of(problems, 5)}.")


def separated(
    rows: Sequence[Row], params: Mapping[str, Any], dtype: Any = None
) -> Iterator[tuple[str, Any]]:
    """The tensors of parameters by path, which `joined` makes the same parameters of."""
    check(rows, params)
    for row in rows:
        x = np.asarray(params[row.path])
        sizes = row.sizes or [x.shape[-1] // len(row.parts)] * len(row.parts)
        pieces = np.split(x, np.cumsum(sizes)[:-1], axis=-1)
        for name, piece in zip(row.parts, pieces, strict=True):
            whole = np.swapaxes(piece, -1, -2) if row.transposed else piece
            for layer, one in enumerate(whole if row.stacked else [whole]):
                yield name.replace("*", str(layer)), np.array(one, dtype or one.dtype, order="C")


def write(folder: Path, tensors: Iterable[tuple[str, Any]], metadata: Mapping[str, str]) -> None:
    """Writes tensors to files of at most 5 GB each, and their index if there are several."""
    from safetensors.numpy import save_file

    named: dict[str, int] = {}
    waiting: dict[str, Any] = {}
    total = size = files = 0

    def save() -> None:
        save_file(waiting, folder / f"{files}{_UNNAMED}", metadata=dict(metadata))
        named.update(dict.fromkeys(waiting, files))
        waiting.clear()

    for name, x in tensors:
        if size and size + x.nbytes > _FILE_BYTES:
            save()
            files, size = files + 1, 0
        waiting[name] = x
        total, size = total + x.nbytes, size + x.nbytes
    save()
    files += 1
    if files == 1:
        (folder / f"0{_UNNAMED}").rename(folder / WEIGHTS)
        return
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    for i, name in enumerate(names):
        (folder / f"{i}{_UNNAMED}").rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {k: names[i] for k, i in named.items()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
