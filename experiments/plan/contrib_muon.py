"""`optax.contrib.muon` as it is, for a plan beside `@muon`: experiments/plan/README.md."""

import re

import gin
import jax
import optax

from research_dp.argument_types import path_name


@gin.register
def contrib_muon():
    """Muon for the decoder's stacked matrices, AdamW for the rest."""

    def dims(params):
        matrix = optax.contrib.MuonDimensionNumbers(1, 2)
        return jax.tree_util.tree_map_with_path(
            lambda k, _: matrix if re.fullmatch("blocks/.*kernel", path_name(k)) else None, params
        )

    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=dims)
