"""One process of a case of `lm_peers.py` in jax; `lm_torch.py` is that of PyTorch."""

import argparse
import os

import jax
import lm_by_hand
import lm_xlstm
import numpy as np
from jax.sharding import Mesh, NamedSharding
from lm_peers import SEQUENCES, inputs, measure
from lm_steps import COMMON, shipped

from research_dp.config import gin_internals, load


def our_step(strategy: str):
    """Returns a step of this package from the common weights."""
    weights, tokens = inputs()
    built = shipped(strategy, SEQUENCES * jax.process_count())

    def common(path, x):
        name = path[1].key if path[0].key == "blocks" else path[0].key
        return jax.make_array_from_callback(x.shape, x.sharding, lambda at: weights[name][at])

    state = built.init(jax.random.key(0))
    states = [state._replace(params=jax.tree_util.tree_map_with_path(common, state.params))]
    batch = built.place_batch({"tokens": tokens})

    def step() -> float:
        states[0], metrics = built.train_step(states[0], batch)
        total, count = jax.device_get(metrics["loss"])
        return total / count

    return step


def loss_of_our_model(weights, tokens, unshard, policy):
    """The loss of this package's decoder, in place of that of `lm_by_hand`."""
    load.load(COMMON, ["VOCAB_SIZE = 256"])
    model = gin_internals.value_of("train.model")
    inner = {name: "scale" if "norm" in name else "kernel" for name in weights["blocks"]}
    params = {
        "embed": {"table": weights["embed"]},
        "norm": {"scale": weights["norm"]},
        "blocks": {name: {inner[name]: x} for name, x in weights["blocks"].items()},
    }
    output = model.loss(params, {}, {"tokens": tokens}, None, train=True)
    return output.total / output.weight


def hand_written_step(code: str, strategy: str):
    """Returns a step without this package's strategies: of `lm_by_hand`, or as in xlstm-jax."""
    weights, tokens = inputs()
    nested = {name: weights.pop(name) for name in ("embed", "norm")} | {"blocks": weights}
    devices = np.array(jax.devices())
    if code == "xlstm":
        mesh = Mesh(devices, "data")
        state, train_step = lm_xlstm.build(mesh, nested)
    else:
        mesh = Mesh(devices[None], ("data", "fsdp"))
        loss = loss_of_our_model if code == "our_model" else lm_by_hand.loss
        state, train_step = lm_by_hand.build(strategy, mesh, nested, loss)
    rows = NamedSharding(mesh, jax.P(mesh.axis_names))
    batch, state = jax.make_array_from_process_local_data(rows, tokens), list(state)

    def step() -> float:
        *state[:], value = train_step(*state, batch)[:3]
        return jax.device_get(value)

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("code", choices=["ours", "our_model", "by_hand", "xlstm"])
    parser.add_argument("strategy")
    parser.add_argument("--steps", type=int, required=True)
    flags = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if count > 1:
        jax.distributed.initialize(f"localhost:{os.environ['MASTER_PORT']}", count, rank)
    ours = flags.code == "ours"
    step = our_step(flags.strategy) if ours else hand_written_step(flags.code, flags.strategy)
    measure(step, flags.steps)


if __name__ == "__main__":
    main()
