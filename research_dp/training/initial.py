"""`train.initial`: a run's first parameters, read from another run, safetensors or Orbax."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np

from research_dp.argument_checks import checked
from research_dp.argument_types import described
from research_dp.distributed.boxed import is_box, value_of
from research_dp.distributed.sharding import by_path, fitted, path_name
from research_dp.errors import UsageError, binding_error, check_patterns, printable, some_of
from research_dp.runs import checkpoint, files, published
from research_dp.runs import checkpoint_files as on_disk
from research_dp.runs.checksum import tree_checksums
from research_dp.runs.manifest import Damaged
from research_dp.runs.tensor_files import Row, tensors_of
from research_dp.strategies import Strategy
from research_dp.strategies.frozen import MODEL_STATE, matched, named_variables, plain_name
from research_dp.types import PyTree

Wanted = Mapping[str, jax.ShapeDtypeStruct]  # with shardings; dims may be longer, for padding
# The arrays of a file or a folder by its own names: all shapes, and what reads some onto shards.
Source = tuple[Mapping[str, Sequence[int]], Callable[[Wanted], Mapping[str, jax.Array]]]


@gin.register("initial_params", module="initial")
@checked
class InitialParams:
    """A run's first parameters from elsewhere: `train.initial = @initial_params()`.

    Parameters have the names of their paths, such as 'head/kernel'; arrays of the model state begin
    with 'model_state/'. All must be found, unless `skip` names them, or the source has no model
    state. They are cast to the model's dtypes. Optimizer, step and keys begin anew.

    Args:
        path: The workdir of a run, whose newest checkpoint is read; one checkpoint in it; a
            `.safetensors` file; or a folder that Orbax wrote.
        rename: Regular expressions, each with its replacement, as in `re.sub`: in this order they
            turn the names there, without 'params/', into names here.
        skip: Regular expressions of full names, here: these parameters stay at their random start.
    """

    def __init__(
        self,
        path: str = gin.REQUIRED,
        rename: Mapping[str, str] | None = None,
        skip: Sequence[str] = (),
    ):
        self._path = Path(files.absolute(path or "''"))  # the current folder is not meant
        self._rename, self._skip = rename or {}, skip
        check_patterns(f"{self._name}.rename", self._rename, self._rename)
        check_patterns(f"{self._name}.skip", skip)

    _name, _where = "initial_params", "initial_params.path"
    _wanted = "the workdir of a run, a .safetensors file, or a folder of arrays that Orbax wrote"
    _advice = ", or .rename change names"
    _anew = re.compile("(?!)")  # begins at the seed, where the source lacks it

    @property
    def _shown(self) -> str:
        return str(files.shown(self._path))

    def _opened(self, config: Mapping[str, Any]) -> Source:
        """What there is. Raises Damaged, or OSError."""
        path = self._path
        if not path.exists():
            raise Damaged("there is no such file or folder")
        if path.is_file():
            return _of_tensors(tensors_of(path))
        if (path / published.CONFIG).is_file():
            raise Damaged("it has Hugging Face's layout, for train.initial = @hf_checkpoint()")
        return _orbax(checkpoint.newest(path) if (path / files.CHECKPOINTS).is_dir() else path)

    def arrays(self, strategy: Strategy, say: Callable[[str], None]) -> dict[str, jax.Array]:
        """The arrays that `strategy.init` takes, on its shardings; every process calls it.

        Raises:
            UsageError: They cannot be read, or their names, shapes or values are not the model's.
        """
        states = strategy.logical_state, strategy.abstract_state
        here, stored = (named_variables(state.params, state.model_state) for state in states)
        return self.read(here, stored, strategy.spec.model.config, say)

    def read(
        self, here: Wanted, stored: Wanted, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> dict[str, jax.Array]:
        """The arrays `here` by name, as they are `stored`, for a model with a `config`."""
        path = self._shown
        try:
            shapes, read = checkpoint.in_all_processes(lambda: self._opened(config))
            taken = self._taken({name: tuple(shape) for name, shape in shapes.items()}, here)
            wanted = {}
            for name, there in taken.items():  # in files what is stored in parts is whole
                is_whole = here[name].size == stored[name].size
                wanted[there] = (here if is_whole else stored)[name]
            with np.errstate(over="ignore"):  # `_lost` counts what becomes infinite
                arrays = checkpoint.in_all_processes(lambda: read(wanted))
        except Damaged as error:
            raise UsageError(
                f"{self._where} = {path} cannot be read: {error}. Give {self._wanted}.",
                binding=self._where,
            ) from error
        unused = sorted(shapes.keys() - taken.values())
        more = f"; nobody takes {some_of(unused, 5)}" if unused else ""
        found = {name: arrays[there] for name, there in taken.items()}
        # One after the other, and counted only where there are any: counts take more memory.
        lost = {k: x for k, x in found.items() if _any_lost(x, here[k].dtype)}
        counts = {k: int(jnp.sum(_lost(x, here[k].dtype))) for k, x in lost.items()}
        if lost:
            said = [f"{n} of {here[k].size} in {k} ({found[k].dtype})" for k, n in counts.items()]
            problem = f" = {path} has NaN, infinite values, or what the model's dtypes lose: "
            advice = f". Mend them, or let {self._name}.skip match them."
            raise binding_error(self._where, problem + some_of(said, 5) + advice)
        say(f"Initial parameters: {len(taken)} arrays of {path}{more}")
        return found

    def _taken(self, shapes: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
        """Name in the model -> name in the source; UsageError has all that does not fit."""
        found: dict[str, str] = {}
        skipped = matched(list(here), self._skip, f"{self._name}.skip")
        for there in shapes:
            name = plain_name(there.removeprefix("params/"))
            for pattern, replacement in self._rename.items():
                name = re.sub(pattern, replacement, name)
            if name in found:
                problem = f": {some_of([found[name], there], 2)} become {printable(name)}."
                raise binding_error("initial_params.rename", problem)
            found[name] = there
        needs_state = any(name.startswith(MODEL_STATE) for name in found)
        taken, problems = {}, []
        for name, x in here.items():
            if name in skipped:
                continue
            if name not in found:
                is_missing = needs_state or not name.startswith(MODEL_STATE)
                if is_missing and not self._anew.fullmatch(name):
                    problems.append(f"{name} {x.shape} is not in it")
            elif shapes[found[name]] != x.shape:
                problems.append(f"{name} is {x.shape} here and {shapes[found[name]]} there")
            else:
                taken[name] = found[name]
        if problems:
            raise UsageError(
                f"{self._where} = {self._shown} does not fit the model: "
                f"{some_of(problems, 5)}.\n  Let {self._name}.skip match what begins anew"
                f"{self._advice}. It has {some_of(sorted(found), 5)}.",
                binding=self._where,
            )
        return taken


def _lost(x: jax.Array, dtype: Any) -> Any:
    """Which values a dtype has not: NaN, infinite, complex, out of its range."""
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.ones(x.shape, bool)
    y = x.astype(dtype)
    return ~jnp.isfinite(y) if jnp.issubdtype(dtype, jnp.inexact) else y.astype(x.dtype) != x


@functools.partial(jax.jit, static_argnums=1)
def _any_lost(x: jax.Array, dtype: Any) -> jax.Array:
    return jnp.any(_lost(x, dtype))


class InitialTree(InitialParams):
    """A run's first parameters, given in Python: `research_dp.run(..., initial=tree)`."""

    _name = _where = "initial"
    _shown = "the tree"
    _advice = ""

    def __init__(self, tree: PyTree):
        self._rename, self._skip = {}, ()
        plain = jax.tree.map(value_of, tree, is_leaf=is_box)
        if wrong := [k for k, x in by_path(plain).items() if not hasattr(x, "shape")]:
            raise UsageError(
                f"initial has {some_of(wrong, 5) if wrong != [''] else described(tree)}, no array. "
                "Give a tree of arrays or an NNX module; of a folder, bind train.initial = "
                "@initial_params()."
            )
        is_of_linen = isinstance(plain, Mapping) and "params" in plain
        self._arrays = {
            path if not is_of_linen or path.startswith(("params/", MODEL_STATE)) else
            MODEL_STATE + path: x
            for path, x in by_path(plain).items()
        }  # fmt: skip

    def _opened(self, config: Mapping[str, Any]) -> Source:
        return _of_tensors(self._arrays)


@gin.register("hf_checkpoint", module="initial")
@checked
class HfCheckpoint(InitialParams):
    """A run's first parameters, of a folder in Hugging Face's layout: `train.initial`.

    Each device reads its own parts of the tensors, in their dtype, and casts them to the model's.
    Adapters, of `transformer.lora_rank`, begin at the seed.

    Args:
        folder: With `config.json`, and `model.safetensors` or its index.
        table: Rows (path here, name of the tensor or names of several, whether it is transposed),
            for a model of your own (docs/fine_tune.md); None: those of the family that
            `config.json` names, and `train.model` is a `transformer` with its options.
        skip: As in `initial_params`.
    """

    _name, _where = "hf_checkpoint", "hf_checkpoint.folder"
    _wanted = "a folder with config.json and model.safetensors or its index"
    _advice, _anew = "", published.ADAPTER

    def __init__(
        self,
        folder: str = gin.REQUIRED,
        table: Sequence[Sequence[Any]] | None = None,
        skip: Sequence[str] = (),
    ):
        super().__init__(folder, skip=skip)
        self.rows = None if table is None else _rows(table)

    def config(self) -> dict[str, Any] | None:
        """The folder's configuration; None: it is not there any more, or has none."""
        is_there = (self._path / published.CONFIG).is_file()
        return published.json_of(self._path) if is_there else None

    def _opened(self, config: Mapping[str, Any]) -> Source:
        if not self._path.is_dir():
            raise Damaged("there is no such folder")
        rows = self.rows
        if rows is None:
            own = config.get("transformer")
            if own is None:
                raise Damaged(f"train.model is no transformer: {self._name}.table has to be given")
            there = published.read_config(self._path)
            found = published.options_of(there)
            rows = published.FAMILIES[there["model_type"]].rows_of(found)
            apart = published.differences(found, own)
            # A head that is skipped may be of another vocabulary.
            begun = ("tied ", "vocab_size ") if self._skip else ()
            if apart := [text for text in apart if not text.startswith(begun)]:
                problem = f" is of another model than train.model: {some_of(apart, 5)}"
                problem += ". Bind them in transformer."
                raise binding_error(self._where, f" = {files.shown(self._path)}{problem}")

        def skipped(path: str) -> bool:
            return any(re.fullmatch(pattern, path) for pattern in self._skip)

        return _of_tensors(published.read(self._path, rows, skipped))


def _rows(table: Sequence[Sequence[Any]]) -> list[Row]:
    """UsageError: they are no rows, or two are of the same parameter or tensor."""
    rows = []
    for given in table:
        path, names, transposed = (*given, None, None, None)[:3]
        parts = [names] if isinstance(names, str) else names
        are_texts = isinstance(parts, list | tuple) and all(isinstance(x, str) for x in parts)
        if not isinstance(path, str) or not are_texts or not parts or len(given) > 3:
            problem = f": {given!r} is no row. Give (path, name or names, whether transposed)."
            raise binding_error("hf_checkpoint.table", problem)
        rows.append(Row(path, tuple(parts), bool(transposed)))
    names = [name for row in rows for name in (f"parameter {row.path}", *row.names)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise binding_error("hf_checkpoint.table", f" has {some_of(twice, 5)} twice.")
    if not rows:
        raise binding_error("hf_checkpoint.table", " has no rows.")
    return rows


def _of_tensors(tensors: Mapping[str, Any]) -> Source:
    """Tensors of which each device's part is read by itself."""
    shapes = {name: x.shape for name, x in tensors.items()}

    def read(wanted: Wanted) -> dict[str, jax.Array]:
        arrays: dict[str, jax.Array] = {}
        for k, x in wanted.items():
            arrays[k] = _on_shards(x, functools.partial(_part, tensors[k], shapes[k], x.shape))
        return arrays

    return shapes, read


def _on_shards(x: jax.ShapeDtypeStruct, read: Callable[[Any], Any]) -> jax.Array:
    """An array whose parts are read one after the other, so that the host has one at a time.

    `jax.make_array_from_callback` has all of them, and keeps them until garbage is collected.
    """
    parts: dict[Any, tuple[Any, list[Any]]] = {}
    for device, index in x.sharding.addressable_devices_indices_map(x.shape).items():
        key = tuple((span.start, span.stop) for span in index)
        parts.setdefault(key, (index, []))[1].append(device)
    shards = []
    for index, devices in parts.values():
        part = read(index)
        shards += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def _part(source: Any, shape: Sequence[int], padded: Sequence[int], index: Any) -> Any:
    """The part of an array at an index into its padded shape; zeros follow what there is."""
    spans = [part.indices(n)[:2] for part, n in zip(index, padded, strict=True)]
    ends = [(min(start, n), min(stop, n)) for (start, stop), n in zip(spans, shape, strict=True)]
    lengths = tuple(stop - start for start, stop in spans)
    if any(start == stop for start, stop in ends):  # of a shard that is all padding
        return np.zeros(lengths, source[tuple(slice(0, 1) for _ in spans)].dtype)
    return fitted(source[tuple(slice(*x) for x in ends)], lengths)


def _orbax(path: Path) -> Source:
    """A folder of arrays, or a checkpoint of a run, whose checksums are compared."""
    import orbax.checkpoint as ocp

    manifest = on_disk.read_manifest(path) if (path / on_disk.MANIFEST).is_file() else None
    folder = path / on_disk.STATE if manifest else path
    tree = on_disk.arrays_in(folder)
    shapes = {name: tuple(x.shape) for name, x in by_path(tree).items()}
    if manifest:
        kept, leaves = ("params/", MODEL_STATE), manifest.leaves
        shapes = {k: leaves.get(k, x).shape for k, x in by_path(tree).items() if k.startswith(kept)}

    def read(wanted: Wanted) -> dict[str, jax.Array]:
        def target(keys: Any, x: Any) -> Any:
            new = wanted.get(path_name(keys))
            return ocp.PLACEHOLDER if new is None else new.update(dtype=x.dtype)

        targets = jax.tree_util.tree_map_with_path(target, tree)
        cut = {name: tuple(shapes[name]) for name, x in wanted.items() if x.shape != shapes[name]}
        whole = on_disk.read_arrays(folder, targets)
        arrays = {name: x for name, x in by_path(whole).items() if name in wanted}
        if manifest and (problem := manifest.mismatch(tree_checksums(arrays, cut))):
            raise Damaged(problem)
        return arrays

    return shapes, read
