"""Muon (Jordan, 2024): matrices by orthogonalised momentum, everything else by AdamW."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gin
import jax
import jax.numpy as jnp
import optax

from research_dp.argument_checks import checked, fits
from research_dp.argument_types import Dtype, path_name
from research_dp.distributed.matrices import on_shared_matrices, sharded_dim
from research_dp.errors import binding_error, check_patterns
from research_dp.training.optimizers import remembering_rate
from research_dp.types import PyTree


class MuonState(NamedTuple):
    """The number of updates, and the momentum of each matrix."""

    count: Any  # 0-d int32; trees are tuples, which have a method `count`
    mu: PyTree


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """Brings the singular values of matrices (batch, rows, columns) near 1, by a quintic."""

    steps: int
    coefficients: tuple[float, float, float]
    eps: float

    def __call__(self, x: jax.Array) -> jax.Array:
        a, b, c = self.coefficients
        x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + self.eps)
        for _ in range(self.steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How an array is a batch of matrices."""

    order: tuple[int, ...]  # of its dims: batch, inputs, outputs
    batch: tuple[int, ...]
    inputs: int
    outputs: int  # of each matrix
    parts: int
    by_rows: bool  # whether the matrices are sharded along rows, as far as is known

    def matrices(self, x: jax.Array) -> jax.Array:
        """(..., rows, columns), of which rows are the fewer."""
        x = x.transpose(self.order)
        x = x.reshape(*self.batch, self.inputs, self.parts, self.outputs)
        x = x.squeeze(-2) if self.parts == 1 else jnp.moveaxis(x, -2, -3)
        return x.mT if self.inputs > self.outputs else x

    def array(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse of `matrices`."""
        x = x.mT if self.inputs > self.outputs else x
        x = x if self.parts == 1 else jnp.moveaxis(x, -3, -2)
        x = x.reshape(tuple(like.shape[i] for i in self.order))
        inverse = tuple(sorted(range(x.ndim), key=self.order.__getitem__))
        return x.transpose(inverse)


def _check(matrices: Mapping[str, Any]) -> None:
    """Raises UsageError for an expression, or dims, that cannot be."""
    check_patterns("muon.matrices", matrices)
    for pattern, dims in matrices.items():
        several = dims if isinstance(dims, Sequence) else ()
        groups = [(d,) if isinstance(d, int) else d for d in several[:2]]
        is_right = dims is None or (
            len(several) in (2, 3)
            and all(fits(g, tuple[int, ...] | list[int]) and len(g) > 0 for g in groups)
            and min(itertools.chain(*groups)) >= 0
            and (len(several) == 2 or (isinstance(dims[2], int) and dims[2] > 0))
        )
        if not is_right:
            problem = (
                f": {dims!r} for {pattern!r}. Give (input dims, output dims), counted from 0, "
            )
            raise binding_error(
                "muon.matrices", f"{problem}and perhaps a number of matrices; or None."
            )


def _layout(path: str, shape: tuple[int, ...], dims: Sequence[Any]) -> _Layout:
    inputs, outputs = ((d,) if isinstance(d, int) else tuple(d) for d in dims[:2])
    parts = dims[2] if len(dims) > 2 else 1
    batch = tuple(sorted(set(range(len(shape))) - {*inputs, *outputs}))
    size = [math.prod(shape[i] for i in some if i < len(shape)) for some in (inputs, outputs)]
    if batch != tuple(range(len(batch))) or len(batch) + len(inputs) + len(outputs) != len(shape):
        problem = (
            f": {tuple(dims)} for {path} {shape} leaves dims {batch}, which are no first ones."
        )
        raise binding_error(
            "muon.matrices", f"{problem} Name all dims but those of stacked layers."
        )
    if size[1] % parts:
        raise binding_error("muon.matrices", f": {parts} does not divide the outputs of {path}.")
    dim, out = sharded_dim(path), size[1] // parts
    by_rows = dim is None or (dim in inputs) != (size[0] > out)  # of which there are fewer
    return _Layout((*batch, *inputs, *outputs), shape[: len(batch)], size[0], out, parts, by_rows)


def scale_by_muon(
    layouts: Callable[[PyTree], PyTree],
    newton_schulz: NewtonSchulz,
    *,
    beta: float,
    nesterov: bool,
    dtype: Dtype | None,
    consistent_rms: float | None,
) -> optax.GradientTransformation:
    """Updates of orthogonalised momentum; `layouts` makes `_Layout`s of a tree of arrays."""

    def init(params: PyTree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(grads: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, MuonState]:
        del params
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        count = optax.safe_increment(state.count)
        hat = optax.tree.bias_correction(mu, beta, count + nesterov)
        if nesterov:
            now = optax.tree.bias_correction(grads, beta, count)
            hat = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, hat, now)

        def scaled(like: jax.Array, layout: _Layout, x: jax.Array) -> jax.Array:
            scale = math.sqrt(max(1.0, layout.outputs / layout.inputs))
            if consistent_rms is not None:
                scale = consistent_rms * math.sqrt(max(layout.inputs, layout.outputs))
            return scale * layout.array(x.astype(like.dtype), like)

        found = layouts(hat)
        matrices = jax.tree.map(
            lambda h, layout: layout.matrices(h.astype(dtype or h.dtype)), hat, found
        )
        by_rows = jax.tree.map(lambda h, layout: layout.by_rows, hat, found)
        new = on_shared_matrices(newton_schulz, matrices, by_rows)
        return jax.tree.map(scaled, hat, found, new), MuonState(count, mu)

    return optax.GradientTransformation(init, update)


@gin.register("muon", module="optim")
@remembering_rate
@checked
def muon(
    learning_rate: Any,
    *,
    matrices: Mapping[str, Any],
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_coeffs: Sequence[float] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-8,
    dtype: Dtype | None = None,
    consistent_rms: float | None = None,
    weight_decay: float = 0.0,
    adam_learning_rate: Any = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Muon for matrices, AdamW for all other parameters; under every strategy.

    The update of a matrix is that of `optax.contrib.muon` (Jordan, 2024; Liu et al., arXiv
    2502.16982). Where parameters are sharded, each device orthogonalises its share of the matrices.

    Args:
        learning_rate: Of both, a number or a schedule.
        matrices: Regular expressions that match full paths of parameters, each with (input dims,
            output dims), or with a third number: into how many matrices the outputs are cut, e.g. 3
            for fused queries, keys and values. Dims before them are stacked layers. None: AdamW.
            The first that matches decides; AdamW trains what none matches.
        beta: Decay of the momentum.
        nesterov: Whether momentum is Nesterov's.
        ns_steps: Newton-Schulz steps.
        ns_coeffs: Coefficients of the quintic.
        eps: Added to the norm of a matrix, and AdamW's epsilon.
        dtype: Of the Newton-Schulz steps and of matrices on the wire, e.g. 'bfloat16' as Jordan has
            it; None: the parameter's.
        consistent_rms: The root mean square of an update, whatever the shape; None: updates are
            scaled by sqrt(max(1, outputs / inputs)).
        weight_decay: Of matrices.
        adam_learning_rate: Of AdamW; None: the same.
        adam_b1: Decay of AdamW's first moment.
        adam_b2: Decay of AdamW's second moment.
        adam_weight_decay: Of what AdamW trains.

    Raises:
        UsageError: Dims do not fit a parameter, or no parameter is a matrix.
    """
    _check(matrices)

    def dims_of(path: str) -> Any:
        return next((dims for p, dims in matrices.items() if re.fullmatch(p, path)), None)

    def labels(params: PyTree) -> PyTree:
        chosen = jax.tree_util.tree_map_with_path(
            lambda k, _: "adam" if dims_of(path_name(k)) is None else "muon", params
        )
        if set(jax.tree.leaves(chosen)) == {"adam"}:
            raise binding_error("muon.matrices", f" = {dict(matrices)}: no parameter is a matrix.")
        return chosen

    def layouts(tree: PyTree) -> PyTree:
        def one(keys: Any, x: Any) -> _Layout:
            return _layout(path_name(keys), x.shape, dims_of(path_name(keys)))

        return jax.tree_util.tree_map_with_path(one, tree)

    a, b, c = ns_coeffs
    newton_schulz = NewtonSchulz(ns_steps, (a, b, c), eps)
    options: dict[str, Any] = {"beta": beta, "nesterov": nesterov, "dtype": dtype}
    options["consistent_rms"] = consistent_rms
    for_matrices = optax.chain(
        scale_by_muon(layouts, newton_schulz, **options),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    decay: dict[str, Any] = {"weight_decay": adam_weight_decay, "nesterov": nesterov}
    others = optax.adamw(rate, adam_b1, adam_b2, eps, **decay)
    return optax.partition({"muon": for_matrices, "adam": others}, labels)
