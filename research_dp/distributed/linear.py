"""Linear functions with a given transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from research_dp.errors import UsageError


def with_gradient(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The linear function `forward`, whose transpose is `backward`, and the reverse.

    Each is the derivative of the other, so derivatives of any order are exact. A full array has the
    gradient of this device's own loss, a shard that of the mean loss. So a gather's gradient is
    scattered and divided, and the gradient of that is gathered without a division. Autodiff would
    divide again.

    Args:
        forward: (pytree, *constants) -> pytree. It closes over no traced value.
        backward: (gradient of the result, *constants) -> gradient of the pytree, in its dtypes.
            Constants, such as indices, are not differentiated.

    Returns:
        A function like `forward`. In forward mode, for which there is no rule, it raises
        UsageError; inside `jax.jit` JAX raises its own TypeError.
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
            # The forward pass has run. Reverse mode calls `transposed` later, elsewhere. Forward
            # mode asks for the tangent here, and each JAX transformation fails in its own words,
            # such as "unhashable type: 'list'".
            raise UsageError(
                "forward-mode differentiation (jvp, jacfwd, hessian) is not available through a "
                "gather. Use reverse over reverse, e.g. jax.jacrev(jax.jacrev(f))."
            ) from error

    return call
