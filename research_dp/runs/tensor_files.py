"""Safetensors files, and rows that say which of their tensors a parameter is made of.

Hugging Face's layout: a folder with one file, or with several and an index. Both directions, from
tensors to parameters and back, read the same rows.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from research_dp.errors import UsageError, printable, some_of
from research_dp.runs.manifest import Damaged

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
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
        each = [self._of_layer(parts, spans[1:]) for parts in self.layers[spans[0]]]
        return np.stack(each)

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
    """Those of a folder's index, or of its one file. Raises Damaged, or OSError."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise Damaged(f"it has neither {WEIGHTS} nor {INDEX}")
        return tensors_of(folder / WEIGHTS)
    try:
        named = json.loads((folder / INDEX).read_text())["weight_map"]
        files = sorted(set(named.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{INDEX} is no index of tensors: {printable(str(error))}") from error
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise Damaged(f"{INDEX} names {some_of(absent, _MOST)}, which is not in it")
    found = {k: x for file in files for k, x in tensors_of(folder / file).items()}
    if absent := sorted(named.keys() - found.keys()):
        raise Damaged(f"{some_of(absent, _MOST)} of {INDEX} is in no file")
    return found


def joined(rows: Sequence[Row], tensors: Mapping[str, Tensor]) -> dict[str, Joined]:
    """Parameters by path. Damaged: tensors are missing, or left over, or do not fit together."""
    made: dict[str, Joined] = {}
    problems: list[str] = []
    taken: set[str] = set()
    for row in rows:
        layers = [row.parts]
        if row.stacked:
            count = _layers(rows, tensors)
            layers = [[name.replace("*", str(i)) for name in row.parts] for i in range(count)]
        names = [name for parts in layers for name in parts]
        taken.update(names)
        if absent := [name for name in names if name not in tensors]:
            problems += absent
            continue
        found = Joined(row, [[tensors[name] for name in parts] for parts in layers])
        first, lasts = found.layers[0], [found.shape_of(x)[-1] for x in found.layers[0]]
        odd = [
            x
            for parts in found.layers
            for x, like in zip(parts, first, strict=True)
            if (x.shape, x.kind) != (like.shape, like.kind)
        ]
        same = {(found.shape_of(x)[:-1], x.kind) for x in first}
        if odd or len(same) > 1 or lasts != list(row.sizes or lasts[:1] * len(lasts)):
            shapes = [f"{x.name} {x.kind} {x.shape}" for x in (*odd, *first)]
            raise Damaged(f"tensors of {row.path} do not fit together: {some_of(shapes, _MOST)}")
        made[row.path] = found
    left = [name for name in tensors if name not in taken and not _BUFFERS.fullmatch(name)]
    left = [name for name in left if not _is_embedding_again(name, tensors)]
    said = [f"without {some_of(problems, _MOST)}"] if problems else []
    said += [f"with {some_of(left, _MOST)}, which no row takes"] if left else []
    if said:
        raise Damaged(f"it is {', and '.join(said)}")
    return made


def _layers(rows: Sequence[Row], tensors: Mapping[str, Tensor]) -> int:
    """How many layers there are: one more than the largest number."""
    stacked = [name for row in rows if row.stacked for name in row.parts]
    patterns = [re.compile(re.escape(name).replace(r"\*", r"(\d+)")) for name in stacked]
    found = (pattern.fullmatch(name) for pattern in patterns for name in tensors)
    return 1 + max((int(match[1]) for match in found if match), default=0)


def _is_embedding_again(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether it is a head that is tied, and equal to the embedding."""
    tied = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight")
    others = [tensors[x] for x in tied if x in tensors]
    if name != "lm_head.weight" or not others or others[0].shape != tensors[name].shape:
        return False
    everything = tuple(slice(0, n) for n in others[0].shape)
    return others[0][everything].tobytes() == tensors[name][everything].tobytes()


def separated(rows: Sequence[Row], params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors of parameters by path, which `joined` makes the same parameters of.

    UsageError: rows and parameters do not fit.
    """
    if problems := sorted({row.path for row in rows} ^ params.keys()):
        raise UsageError(f"rows and parameters are not of the same model: {some_of(problems, 5)}.")
    for row in rows:
        x = np.asarray(params[row.path])
        sizes = row.sizes or [x.shape[-1] // len(row.parts)] * len(row.parts)
        pieces = np.split(x, np.cumsum(sizes)[:-1], axis=-1)
        for name, piece in zip(row.parts, pieces, strict=True):
            whole = np.swapaxes(piece, -1, -2) if row.transposed else piece
            if not row.stacked:
                yield name, np.ascontiguousarray(whole)
                continue
            for layer, one in enumerate(whole):
                yield name.replace("*", str(layer)), np.ascontiguousarray(one)


def write(folder: Path, tensors: Iterable[tuple[str, Any]], metadata: Mapping[str, str]) -> None:
    """Writes tensors to files of at most 5 GB each, and their index if there are several."""
    from safetensors.numpy import save_file

    files: list[dict[str, Any]] = [{}]
    sizes = [0]
    for name, x in tensors:
        if sizes[-1] and sizes[-1] + x.nbytes > _FILE_BYTES:
            files.append({})
            sizes.append(0)
        files[-1][name] = x
        sizes[-1] += x.nbytes
    if len(files) == 1:
        save_file(files[0], folder / WEIGHTS, metadata=dict(metadata))
        return
    named = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(file, folder / name, metadata=dict(metadata))
        named.update(dict.fromkeys(file, name))
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": named}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
