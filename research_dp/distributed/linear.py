"""Linear functions whose gradient is a given linear function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from research_dp.errors import UsageError


def with_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A linear function, and the linear function that maps its gradients back.

    Each is the derivative of the other, so derivatives of any order are exact. A full array has the
    gradient of this device's own loss; a shard has that of the mean loss. So a gather's gradient is
    scattered and divided, and its gradient is gathered, undivided. Autodiff would divide again.

    Args:
        forward: (pytree, *constants) -> pytree. It closes over no traced value.
        backward: (gradient of what `forward` returns, *constants) -> gradient of its first
            argument, in its dtypes. Constants, such as indices, are not differentiated.

    Returns:
        (pytree, *constants) -> pytree. It raises UsageError in forward mode, for which there is no
        rule; inside `jax.jit` JAX raises its own TypeError instead.
    """
    linearised: list[bool] = []

    run = jax.custom_vjp(forward)

    def transposed(constants: tuple[Any, ...], g: Any) -> tuple[Any, ...]:
        return with_gradient(backward, forward)(g, *constants), *(None for _ in constants)

    def with_residuals(x: Any, *constants: Any) -> tuple[Any, tuple[Any, ...]]:
        out = run(x, *constants)
        linearised.append(True)
        return out, constants

    run.defvjp(with_residuals, transposed)

    def call(x: Any, *constants: Any) -> Any:
        linearised.clear()
        try:
            return run(x, *constants)
        except TypeError as error:
            if not linearised:
                raise
            # The forward pass is over. Reverse mode calls `transposed` later, elsewhere; forward
            # mode asks JAX for the tangent right here, and each transformation refuses it in words
            # of its own, such as "unhashable type: 'list'".
            raise UsageError(
                "forward-mode differentiation (jvp, jacfwd, hessian) is not available through a "
                "gather. Use reverse over reverse, e.g. jax.jacrev(jax.jacrev(f))."
            ) from error

    return call
