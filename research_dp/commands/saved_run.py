"""`load` and `export`: the model and the parameters of a run, back from its folder."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import SingleDeviceSharding

from research_dp.argument_checks import checked
from research_dp.argument_types import CountOrZero
from research_dp.commands import configured, jax_setup
from research_dp.commands.configured import usage_error
from research_dp.config import gin_internals
from research_dp.distributed.sharding import as_stored, by_path, fitted, is_key, key_data
from research_dp.errors import UsageError, binding_error, printable
from research_dp.models.transformer import transformer
from research_dp.runs import published, tensor_files
from research_dp.runs.checkpoint import SavedState, read_saved
from research_dp.runs.manifest import Damaged
from research_dp.strategies import Strategy
from research_dp.strategies.frozen import with_frozen
from research_dp.training import python_objects
from research_dp.training.initial import HfCheckpoint
from research_dp.types import PyTree, TrainableModel

SAFETENSORS = ".safetensors"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """What `load` returns; `model, params = load(workdir)` takes the first two.

    Attributes:
        model: The run's model. Its `apply` takes (params, inputs), and has the checkpoint's model
            state, e.g. batch statistics. It is None if the model was made without it.
        params: Parameters, nested dicts of `jax.Array`.
        model_state: The checkpoint's model state, nested dicts of `jax.Array`.
        step: Number of steps that the parameters were trained.
    """

    model: TrainableModel
    params: PyTree
    model_state: PyTree
    step: int

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.params))


@checked
def load(
    workdir: str | os.PathLike[str],
    step: CountOrZero | None = None,
    *,
    model: python_objects.Model | None = None,
    strategy: Strategy | None = None,
    imports: Sequence[str] = (),
) -> LoadedModel:
    """The model and the parameters of a run, whatever strategy and devices it had.

    Example: `model, params = load("runs/digits"); logits = model.apply(params, images)`.

    Args:
        workdir: Folder of a run, which may be going on.
        step: Of the checkpoint; None: the newest.
        model: That of the run, if `run` was given it as an object.
        strategy: A built strategy, whose shardings the parameters get, as `abstract_state` has
            them. None: they are unsharded, on the default device.
        imports: Modules of yours besides those that the run imported.

    Returns:
        It unpacks into the model and the parameters, and also has `model_state` and `step`.

    Raises:
        UsageError: There is no checkpoint, it is damaged, or a module of yours cannot be imported.
    """
    folder = Path(workdir).expanduser()
    with configured.session(imports=imports) as run:
        run.load(complete=False, saved=folder)
        jax_setup.set_up_devices(None)
        saved = read_saved(folder, step)
        if model is None:
            model = gin_internals.frozen("train.model")
        if strategy is None:
            params, model_state = jax.device_put((saved.params, saved.model_state))
        else:
            check_same_model(saved, strategy)
            state = strategy.abstract_state
            like = with_frozen(state.params, state.model_state)
            params, model_state = place((saved.params, saved.model_state), like)
    assert model is not None
    if model.apply is not None and model_state:
        model = dataclasses.replace(model, apply=_with_state(model.apply, model_state))
    return LoadedModel(model, params, model_state, saved.step)


@checked
def load_hf(
    folder: str | os.PathLike[str], *, strategy: Strategy | None = None, **options: Any
) -> LoadedModel:
    """The model and the parameters of a folder in Hugging Face's layout.

    Example: `model, params = load_hf("gpt2"); logits = model.apply(params, tokens)`.

    Args:
        folder: With `config.json`, of a family in docs/fine_tune.md, and `model.safetensors` or its
            index.
        strategy: A built strategy of the same model, whose shardings the parameters get. None: they
            are unsharded, on the default device.
        **options: Of `transformer`, e.g. `dtype="bfloat16"`, besides those of `config.json`.

    Returns:
        It unpacks into the model and the parameters, which are float32.

    Raises:
        UsageError: The folder cannot be read, or is of another model than the decoder here.
    """
    path = Path(folder).expanduser()
    jax_setup.set_up_devices(None)
    try:
        found = published.options_of(published.read_config(path))
    except (Damaged, OSError) as error:
        raise UsageError(f"load_hf: {path} cannot be read: {error}.") from error
    model = transformer(**{**found, **options})
    if strategy is None:
        tokens = {"tokens": jax.ShapeDtypeStruct((1, 2), jnp.int32)}
        on_device = SingleDeviceSharding(jax.devices()[0])
        shapes = by_path(jax.eval_shape(lambda: model.init(jax.random.key(0), tokens)[0]))
        here = stored = {k: x.update(sharding=on_device) for k, x in shapes.items()}
    else:
        here, stored = (
            by_path(state.params) for state in (strategy.logical_state, strategy.abstract_state)
        )
    arrays = HfCheckpoint(str(path)).read(here, stored, model.config, lambda text: None)
    if stored.keys() != arrays.keys():
        problem = " > 0: no folder has adapters. A run begins them, by train.initial."
        raise binding_error("transformer.lora_rank", problem)
    arrays = {name: x.astype(stored[name].dtype) for name, x in arrays.items()}
    return LoadedModel(model, unflatten_dict(arrays, sep="/"), {}, 0)


def _with_state(apply: Callable[..., Any], saved: PyTree) -> Callable[..., Any]:
    """`TrainableModel.apply` with the saved model state in place of none."""

    @functools.wraps(apply)
    def with_state(params: PyTree, inputs: Any, model_state: PyTree | None = None) -> Any:
        return apply(params, inputs, saved if model_state is None else model_state)

    return with_state


@checked
def export(
    workdir: str | os.PathLike[str],
    to: str | os.PathLike[str],
    step: CountOrZero | None = None,
    *,
    hf: bool = False,
) -> int:
    """Writes the parameters of a run for other programs; returns the step that was exported.

    A name that ends in `.safetensors` is a file of that format, whose keys are paths such as
    'params/hidden_0/kernel'. Any other is a new folder that Orbax's `StandardCheckpointer` reads:
    a dict of 'params' and 'model_state'. Arrays are unsharded. Folders above it are made.

    Args:
        workdir: Folder of a run, which may be going on.
        to: File or folder to write, which must not exist.
        step: Of the checkpoint; None: the newest.
        hf: Whether `to` is a new folder in Hugging Face's layout, which transformers reads: of a
            `transformer` that a family there has, or of a model with `hf_checkpoint.table`.

    Raises:
        UsageError: There is no checkpoint, it is damaged, or `to` exists or cannot be written.
    """
    with configured.session():
        return write_export(Path(workdir).expanduser(), Path(to).expanduser(), step, hf=hf)


def write_export(workdir: Path, to: Path, step: int | None, *, hf: bool = False) -> int:
    """`export` as a command calls it."""
    if to.exists():
        raise UsageError(f"--export={to} exists: give a new name.")
    if hf:
        return _write_hf(workdir, to, step)
    jax_setup.set_up_devices(None)
    saved = read_saved(workdir, step)
    with usage_error(f"--export={to} cannot be written"):
        to.parent.mkdir(parents=True, exist_ok=True)
    tree = {"params": saved.params, "model_state": saved.model_state}
    if to.suffix == SAFETENSORS:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        facts = {"format": "research_dp", "step": str(saved.step)}
        arrays = {path: np.asarray(x, order="C") for path, x in by_path(key_data(tree)).items()}
        try:
            save_file(arrays, to, metadata=facts)
        except SafetensorError as error:
            raise UsageError(f"--export={to} cannot be written: {error}.") from error
    else:
        import orbax.checkpoint as ocp

        with usage_error(f"--export={to} cannot be written"), ocp.StandardCheckpointer() as saver:
            saver.save(to.absolute(), as_stored(tree))
    return saved.step


def _write_hf(workdir: Path, to: Path, step: int | None) -> int:
    """Writes tensors in the dtype that the folder's config.json names, or in float32."""
    with configured.session() as run:
        run.load(complete=False, saved=workdir)
        jax_setup.set_up_devices(None)
        saved = read_saved(workdir, step)
        options = gin_internals.frozen("train.model").config.get("transformer")
        bound = gin.get_bindings("train", resolve_references=False)
        begun = gin_internals.frozen("train.initial") if "initial" in bound else None
    rows, config = None, None
    if isinstance(begun, HfCheckpoint):
        try:
            rows, config = begun.rows, begun.config()
        except (Damaged, OSError) as error:
            raise UsageError(f"--hf: hf_checkpoint.folder cannot be read: {error}.") from error
    if rows is None:
        if options is None:
            raise UsageError(
                "--hf: the run's model is no transformer, and its train.initial no hf_checkpoint "
                "with a table of tensors."
            )
        kind = config["model_type"] if config else published.family_of(options)
        rows = published.FAMILIES[kind].rows_of(options)
        config = config or published.config_of(kind, options)
    named = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
    dtype = jnp.dtype(named if named in ("bfloat16", "float16") else "float32")
    params = by_path(saved.params)
    if options and options["lora_rank"]:
        params = published.merged(params, options)
    tensor_files.check(rows, params)
    with usage_error(f"--export={to} cannot be written"):
        to.mkdir(parents=True)
        # As transformers wants it of files that it did not write itself.
        tensor_files.write(to, tensor_files.separated(rows, params, dtype), {"format": "pt"})
        if config:
            (to / published.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return saved.step


def check_same_model(saved: SavedState, strategy: Strategy) -> None:
    """Refuses a checkpoint whose parameters have other names or shapes than a strategy's."""
    state = strategy.logical_state
    params, model_state = with_frozen(state.params, state.model_state)
    expected = by_path({"params": params, "model_state": model_state})
    there = by_path({"params": saved.params, "model_state": saved.model_state})
    for path in sorted(expected.keys() | there.keys(), key=lambda p: (p[:6] != "params", p)):
        here, found = (tree[path].shape if path in tree else None for tree in (expected, there))
        if here != found:
            here, found = ("missing" if x is None else f"{x}" for x in (here, found))
            raise UsageError(
                f"the checkpoint of step {saved.step} is of another model: {printable(path)} is "
                f"{found} in it, and {here} in the configuration."
            )


def place(arrays: PyTree, abstract: PyTree) -> PyTree:
    """Unsharded host arrays as global arrays of these shapes, dtypes and shardings."""

    def one(x: Any, like: Any) -> jax.Array:
        stored = x if is_key(x) else fitted(x.astype(like.dtype), like.shape)
        return jax.device_put(stored, like.sharding)

    return jax.tree.map(one, arrays, abstract)
