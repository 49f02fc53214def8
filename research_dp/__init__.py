"""research_dp: data-parallel training in JAX, the strategy chosen by a gin file."""
