"""A right call of each public function, and what kind of argument each of its parameters takes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils, nnx
from flax.training.train_state import TrainState as FlaxState
from jax.sharding import PartitionSpec as P

import research_dp as rdp
from research_dp.distributed.optimizer import dynamic_loss_scale
from tests.support import steps

# Arguments that no parameter, or few, should take.
WRONG = {
    "None": None,
    "an object": object(),
    "text": "text",
    "texts": ("text",),
    "an axis twice": ("fsdp", "fsdp"),
    "an axis twice, nested": ["fsdp", ("fsdp",)],
    "int8": "int8",
    "3": 3,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "NaN": float("nan"),
    "True": True,
    "()": (),
    "{}": {},
    "numbers": [1, 2],
    "an array": np.ones(3, np.float32),
    "a 0-d array": jnp.ones(()),
    "another tree": {"other": np.ones(3, np.float32)},
    "a key": jax.random.key(0),
    "float0": np.zeros(3, jax.dtypes.float0),
    "objects": np.array([None, "a"], object),
    "an array of text": np.array(["a", "b"]),
    "a tree with a key": {"w": jax.random.key(0)},
    "a tree with float0": {"w": np.zeros(3, jax.dtypes.float0)},
    "a tree with objects": {"w": np.array([None], object)},
    "a tree with text": {"w": "text"},
    "a function": lambda *args, **kwargs: None,
    "a class": str,
}
EVERY = frozenset(WRONG)
# Kind of parameter -> those of them that it may take; with '?' None too.
ARRAYS = {"an array", "a 0-d array", "another tree", "()", "{}"}
TAKES = {
    "one of its class": (),
    "arrays": ARRAYS,
    "arrays or numbers": {*ARRAYS, "3", "0", "-1", "1.5", "NaN", "True", "numbers"},
    "to be placed": {
        *(*ARRAYS, "3", "0", "-1", "1.5", "NaN", "True", "numbers", "a key", "a tree with a key"),
    },
    "shapes": {*ARRAYS, "a tree with numbers"},
    "an array": {"an array", "a 0-d array"},
    "a number": {"an array", "a 0-d array", "3", "0", "-1", "1.5", "NaN", "True"},
    "random keys": {"a key", "a tree with a key"},
    "like another": (),
    "anything": EVERY,
    "an axis": {"text", "int8", "texts"},
    "axes": {"text", "int8", "texts", "()"},
    "axes of a later call": {
        "()",
        "text",
        "int8",
        "texts",
        "an axis twice",
        "an axis twice, nested",
    },
    "a count": {"3"},
    "a count or 0": {"3", "0"},
    "an integer": {"3", "0", "-1"},
    "a norm": {"3", "0", "1.5"},
    "a traced norm": {"3", "0", "1.5", "a 0-d array"},
    "a flag": {"True"},
    "a dtype": (),
    "text": {"text", "int8"},
    "texts": {"texts", "an axis twice", "()"},
    "metrics": {"()", "{}"},
    "text or texts": {"text", "int8", "texts", "an axis twice", "()"},
    "text, texts or a class": {"text", "int8", "texts", "an axis twice", "()", "a class"},
    "inputs of a model": {"text", "int8", "texts", "an axis twice", "()", "a function", "a class"}
    | {"{}", "another tree", *(key for key in WRONG if key.startswith("a tree"))},
    "counts": {"numbers", "()"},
    # What a function of the caller's does with its arguments is its own affair.
    "a function": {"a function", "a class"},
    "a function's flag": {"True"},
    "a function's argument": EVERY,
    "sizes": {"{}"},
    "a dict": {"{}", "another tree", *(key for key in WRONG if key.startswith("a tree"))},
    "a shape": {"numbers", "()"},
}

MESH = rdp.make_mesh({"data": 2, "fsdp": 4})
SHARDING = rdp.create_data_parallel_sharding(MESH)
TREE = {"w": np.ones((8, 16), np.float32)}
LAYOUT = rdp.infer_sharding(TREE, lambda *_: rdp.ShardDecision(0), 4)
BOXED = {"w": nn.Partitioned(jnp.ones((2, 16)), ("fsdp", None))}
SGD = optax.sgd(0.1)
MODEL = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
STATE = jax_utils.replicate(FlaxState.create(apply_fn=None, params=TREE, tx=SGD))


def squares(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def trainable():
    """The smallest model."""

    def loss(params, model_state, batch, keys, train, batch_axes):
        total = jnp.sum((batch["x"] @ params["w"]) ** 2)
        return rdp.LossOutput(total, jnp.float32(len(batch["x"])), model_state, {})

    def init(key, batch):
        return {"w": jnp.ones((batch["x"].shape[-1], 16))}, {}

    return {"init": init, "loss": loss}


def recipe(engine=rdp.mapped):
    sync = None if engine is rdp.compiled else rdp.sync_gradients
    return rdp.data_parallel(name="ddp", engine=engine, mesh=MESH, sync=sync)


SPEC = {
    "model": rdp.TrainableModel(**trainable()),
    "optimizer": SGD,
    "example": {"x": jax.ShapeDtypeStruct((8,), np.float32)},
    "batch_size": 16,
}

# Parameter -> (a right argument, its kind), where a call below says nothing else.
USUAL = {
    "accumulation_steps": (1, "a count"),
    "axes": (("data", "fsdp"), "axes"),
    "axis": ("fsdp", "an axis"),
    "axis_name": ("fsdp", "an axis"),
    "axis_names": (("data", "fsdp"), "axes"),
    "axis_size": (4, "a count"),
    "bucket_bytes": (0, "an integer"),
    "communication_size": (0, "an integer"),
    "communication_stream": (None, "one of its class?"),
    "data_axis": ("data", "text"),
    "dim": (0, "an integer"),
    "dp_group": ("data", "axes?"),
    "dtype": (None, "a dtype?"),
    "fsdp_group": ("fsdp", "axes?"),
    "gather_dtype": (None, "a dtype?"),
    "grad_scatter_dtype": (None, "a dtype?"),
    "gradients": (TREE, "arrays or numbers"),
    "grads": (TREE, "arrays or numbers"),
    "has_aux": (False, "a function's flag"),
    "layout": (LAYOUT, "like another"),
    "loss": (None, "a number?"),
    "loss_fn": (squares, "a function"),
    "max_grad_norm": (None, "a norm?"),
    "max_norm": (1.0, "a traced norm?"),
    "mesh": (MESH, "one of its class"),
    "methods": (("__call__",), "texts"),
    "min_weight_bytes": (None, "a count or 0?"),
    "min_weight_size": (0, "a count or 0"),
    "opt_state": (SGD.init(TREE), "anything"),
    "optimizer": (SGD, "one of its class"),
    "param_dtype": (None, "a dtype?"),
    "parameters": (TREE, "arrays or numbers"),
    "params": (TREE, "arrays or numbers"),
    "path": ("w", "text"),
    "pre_divide": (False, "a flag"),
    "config": (recipe(), "one of its class"),
    "reduce_type": ("mean", "one of its class"),
    "reduction": (rdp.PLAIN, "one of its class"),
    "rule": (None, "a function?"),
    "shape": ((8, 16), "a shape"),
    "sharding": (SHARDING, "one of its class"),
    "shards": (4, "a count"),
    "spec": (rdp.TrainSpec(**SPEC), "one of its class"),
    "transform": (SGD, "one of its class"),
    "tree": (TREE, "arrays"),
    "x": (np.ones((8, 16), np.float32), "an array"),
}
EAGER_AXIS = {"axis_name": ("data", "text")}
OF_A_CLASS = {"axis_name": ("fsdp", "axes of a later call")}


OF_A_MODEL = {
    "loss": (lambda output, target: output[:, 0], "a function"),
    "inputs": ("x", "inputs of a model"),
    "targets": ("y", "text?"),
    "metrics": (None, "a dict?"),
    "weights": (None, "text?"),
    "config": (None, "a dict?"),
    "bounds": (None, "a dict?"),
    "units": (None, "text, texts or a class?"),
    "rngs": ((), "text or texts"),
}
# Parameters of functions that are commands too, or that read gin files.
OF_GIN = {"bindings": ((), "anything"), "imports": ((), "texts")}
OF_AN_EVALUATION = {
    **OF_GIN,
    "gin_files": ((), "anything"),
    "cpu_devices": (None, "a count?"),
}
OF_A_RUN = {**OF_AN_EVALUATION, "allow_unused": (False, "a flag")}
OBJECTS = dict.fromkeys(("model", "data", "optimizer"), (None, "one of its class?"))
OF_A_WORKDIR = {"workdir": ("unused", "anything"), "step": (None, "a count or 0?")}
LOOP = recipe().build(rdp.TrainSpec(**SPEC))
OF_A_LOOP = {
    "strategy": (LOOP, "one of its class"),
    "data": (rdp.from_arrays(np.ones((16, 8), np.float32)), "one of its class"),
}
# Public name -> what differs of its parameters.
CALLS = {
    "DataParallel": {},
    "DataParallel.all_reduce_gradients": {"axis_name": ("data", "axes")},
    "DataParallel.all_reduce_gradients_static": {"axis_name": ("data", "axes")},
    "DataParallel.create_data_parallel_sharding": {},
    "DataParallel.create_data_parallel_sharding_static": {},
    "DataParallel.replicate_params": {"params": (TREE, "to be placed")},
    "DataParallel.shard_batch": {"batch": (TREE, "to be placed")},
    "DataParallel.shard_batch_static": {"batch": (TREE, "to be placed")},
    "DataParallel.shard_model_state": {
        "state": (TREE, "to be placed"),
        "param_sharding": ("replicate", "sizes?"),
    },
    "DeviceMeshManager": {"devices": (None, "one of its class?")},
    "DeviceMeshManager.create_data_parallel_mesh": {
        "num_devices": (8, "a count?"),
        **EAGER_AXIS,
    },
    "DeviceMeshManager.create_device_mesh": {
        "mesh_shape": ({"data": 8}, "one of its class"),
        "devices": (None, "one of its class?"),
    },
    "DeviceMeshManager.create_hybrid_mesh": {
        "data_parallel_size": (1, "a count"),
        "model_parallel_size": (1, "a count"),
        "model_axis": ("model", "text"),
    },
    "DeviceMeshManager.create_model_parallel_mesh": {
        "num_devices": (8, "a count?"),
        **EAGER_AXIS,
    },
    "DeviceMeshManager.get_mesh_info": {},
    "MeshRules": {name: ("data", "text?") for name in ("data", "embed", "mlp", "heads")},
    "OptaxAdapter": {"state": (None, "anything")},
    "OptaxAdapter.apply_gradients": {},
    "OptaxAdapter.check_slices": {},
    "OptaxAdapter.init": {},
    "TrainSpec": {
        **{name: (value, "one of its class") for name, value in SPEC.items()},
        "example": (SPEC["example"], "anything"),
        "batch_size": (16, "a count"),
        "max_grad_norm": (None, "a norm?"),
        "seed": (0, "a count or 0"),
        "loss_scale": (dynamic_loss_scale(), "one of its class?"),
        "skip_nonfinite": (False, "a flag"),
        "loss_over": ("batch", "anything"),
        "frozen": ((), "anything"),
    },
    "TrainableModel": {
        **{name: (value, "a function") for name, value in trainable().items()},
        "config": ({}, "a dict"),
        "units": ({}, "sizes"),
        "work": (None, "a function?"),
        "bounds": ({}, "a dict"),
        "apply": (None, "a function?"),
        "find_units": (None, "a function?"),
        "counted": (None, "a function?"),
        "decode": (None, "a function?"),
    },
    "accumulate_gradients": {
        "loss": (lambda *trees: sum(map(jnp.sum, jax.tree.leaves(trees))), "a function"),
        "micro_batches": (np.ones((2, 4, 8), np.float32), "arrays"),
        "gather": (None, "a function?"),
        "params": (TREE, "arrays"),
    },
    "all_mean": {},
    "all_mean_tree": {},
    "apply_gradients": {"optimizer": (rdp.OptaxAdapter(SGD), "one of its class")},
    "choose_dim": {"free": (None, "one of its class?"), "pads": (True, "a flag")},
    "clip_by_global_norm": {
        "max_norm": (1.0, "a traced norm"),
        "axis_names": (("data", "fsdp"), "axes of a later call"),
        "layout": (None, "anything"),
    },
    "clip_by_global_norm_sharded": {
        "max_norm": (1.0, "a traced norm"),
        "layout": (None, "like another?"),
    },
    "compiled": {"config": (recipe(rdp.compiled), "one of its class")},
    "create_data_parallel_sharding": {},
    "data_parallel": {
        "name": ("ddp", "text"),
        "engine": (rdp.mapped, "a function"),
        **{slot: (None, "a function?") for slot in ("shard", "gather", "sync", "update")},
        "optimizer": (None, "a function?"),
        "state_axes": (("fsdp",), "text or texts"),
        "reshard_after_forward": (True, "a flag"),
        "sync_each": ("step", "one of its class"),
        "accumulation_dtype": (None, "a dtype?"),
        "loss_scale": (None, "one of its class?"),
        "prefetch": (False, "a flag?"),
        "overlap": (True, "a flag"),
        "choose": (None, "a function?"),
        "compiler_options": (None, "a dict?"),
        "tuning": (None, "one of its class?"),
        "compression": (None, "one of its class?"),
        "outer": (None, "one of its class?"),
    },
    "data_parallel_rules": {"data_axis": ("data", "text")},
    "data_parallel_train_step": {
        "loss_fn": (steps.squares, "a function"),
        "batch": ({"x": np.ones((8, 2, 8), np.float32)}, "arrays"),
        "state": (STATE, "one of its class"),
        "rngs": (None, "random keys?"),
    },
    "dim_by_path": {"dims": ({"w": 0}, "sizes"), "otherwise": (rdp.largest_dim, "a function")},
    "fsdp_apply_gradients": {
        "optimizer": (rdp.OptaxAdapter(SGD), "one of its class"),
        "shardings": (None, "like another?"),
        "stored": (None, "like another?"),
        "mesh": (None, "one of its class?"),
        "encoding": (None, "one of its class?"),
    },
    "fsdp_update": {},
    "gather_array_with_mean_grads": {"axis": (0, "an integer")},
    "gather_params": {
        "params": (BOXED, "to be placed"),
        "bucket_bytes": (None, "an integer?"),
        "rows": (None, "an array?"),
        "mesh": (None, "one of its class?"),
        "encoding": (None, "one of its class?"),
    },
    "gather_tree": {
        "tree": ({"w": np.ones((2, 16), np.float32)}, "arrays"),
        "into": (None, "like another?"),
        "axis": ("fsdp", "axes"),
        "replicated": (True, "a flag"),
    },
    "global_norm": {"tree": (TREE, "arrays or numbers")},
    "init_sharded": {"init": (lambda: TREE, "a function")},
    "largest_dim": {},
    "infer_sharding": {"tree": (TREE, "shapes"), "units": (None, "sizes?")},
    "linen_functions": {"module": (nn.Dense(3), "one of its class")},
    "from_linen": {
        "module": (nn.Dense(3), "one of its class"),
        **OF_A_MODEL,
        "eval_module": (None, "one of its class?"),
    },
    "from_nnx": {"factory": (lambda rngs: nnx.Linear(4, 1, rngs=rngs), "a function"), **OF_A_MODEL},
    "from_arrays": {
        "x": (np.ones((16, 8), np.float32), "anything"),
        "y": (None, "anything"),
        "eval": (0.5, "anything"),
        "names": (("x", "y"), "texts"),
        "info": (None, "a dict?"),
        "augment": (None, "a function?"),
        "name": ("arrays", "text"),
    },
    "from_source": {
        "source": ([{"x": np.ones(8, np.float32)}] * 16, "anything"),
        "eval": (0.5, "anything"),
        "transform": (None, "a function?"),
        "augment": (None, "a function?"),
        "info": (None, "a dict?"),
        "name": ("source", "text"),
        "threads": (0, "a count or 0"),
        "workers": (0, "a count or 0"),
        "cache_bytes": (0, "a count or 0"),
    },
    "make_mesh": {
        "axes": ({"data": -1}, "one of its class"),
        "devices": (None, "one of its class?"),
    },
    "mapped": {},
    "nnx_variables": {"module": (MODEL, "one of its class")},
    "update_nnx": {
        "module": (MODEL, "one of its class"),
        "params": (rdp.nnx_variables(MODEL)[0], "like another"),
        "model_state": (None, "sizes?"),
    },
    "nnx_functions": {"factory": (lambda shape, rngs: MODEL, "a function")},
    "one_device_mesh": {},
    "pad_to_multiple": {"multiple": (3, "a count")},
    "place_batch_on_shards": {"batch": (TREE, "anything")},
    "place_model_state_on_shards": {
        "state": (TREE, "to be placed"),
        "param_sharding": (None, "sizes?"),
    },
    "place_nnx_state_on_shards": {
        "state": (nnx.state(MODEL), "one of its class"),
        "filter_sharding": ({...: P()}, "one of its class"),
    },
    "reduce_gradient_tree": {},
    "reduce_gradients_across_devices": {"axis_name": ("data", "axes")},
    "run": {
        **OF_A_RUN,
        **OBJECTS,
        "initial": (None, "anything"),
        "workdir": ("unused", "anything"),
    },
    "certify": {
        **OF_A_RUN,
        **OBJECTS,
        "against": ("single", "text"),
        "steps": (1, "a count"),
        "quick": (False, "a flag"),
    },
    "compare": {
        **OF_A_RUN,
        **OBJECTS,
        "runs": (("unused",), "anything"),
        "strategies": ((), "text or texts"),
        "steps": (None, "a count?"),
        "vary": (None, "a dict?"),
        "workdir": (None, "anything"),
        "topology": (None, "text?"),
        "bound": (None, "a count or 0?"),
        "html_file": (None, "anything"),
    },
    "dry_run": OF_A_RUN,
    "check_batch_loss": {
        "strategy": OF_A_LOOP["strategy"],
        "batch": ({"x": np.ones((16, 8), np.float32)}, "one of its class"),
    },
    "eval_metrics": {**OF_A_LOOP, "state": (LOOP.init(0), "one of its class")},
    "evaluate": {**OF_AN_EVALUATION, **OF_A_WORKDIR},
    "export": {**OF_A_WORKDIR, "to": ("unused", "anything"), "hf": (False, "a flag")},
    "load": {
        **OF_A_WORKDIR,
        "model": (None, "one of its class?"),
        "strategy": (None, "one of its class?"),
        "imports": ((), "texts"),
    },
    "load_hf": {"folder": ("unused", "anything"), "strategy": (None, "one of its class?")},
    "metric_means": {"steps": ({"loss": np.ones(2, np.float32)}, "metrics")},
    "plan": {
        **OF_A_RUN,
        **OBJECTS,
        "topology": ("here", "text"),
        "strategies": ((), "text or texts"),
        "sizes": ((), "counts"),
        "advise": (False, "a flag"),
        "measure": (False, "a flag"),
        "html_file": (None, "anything"),
        "dump_hlo": (None, "anything"),
    },
    "strategy": {**OF_GIN, "name": ("ddp", "text")},
    "train_batches": {
        **OF_A_LOOP,
        "num_steps": (1, "a count"),
        "first_step": (0, "a count or 0"),
    },
    "scatter_gradients": {
        "grads": (TREE, "arrays or numbers"),
        "shardings": (LAYOUT, "like another"),
        "encoding": (None, "one of its class?"),
    },
    "scatter_mean": {},
    "scatter_mean_tree": {"axis": ("fsdp", "axes"), "replica_axes": ((), "axes")},
    "shard_module_params": {"target": (nn.Dense, "a function"), **OF_A_CLASS},
    "shard_nnx_module_params": {"target": (nnx.Linear, "one of its class"), **OF_A_CLASS},
    "shard_params": {
        "params": (TREE, "to be placed"),
        "units": (None, "a dict?"),
        "on_decision": (None, "a function?"),
        "pads": (True, "a flag"),
    },
    "sharded_global_norm": {"layout": (None, "like another?")},
    "sharding_report": {
        "params": (TREE, "arrays or numbers"),
        "axis_name": ("fsdp", "an axis"),
    },
    "slice_specs": {},
    "slice_state": {"state": (SGD.init(TREE), "anything")},
    "spmd_train_step": {
        "max_grad_norm": (None, "a traced norm?"),
        "model": (MODEL, "one of its class"),
        "optimizer": (nnx.Optimizer(MODEL, SGD, wrt=nnx.Param), "one of its class"),
        "batch": ({"x": np.ones((8, 4), np.float32)}, "a function's argument"),
        "rngs": (None, "a function's argument"),
    },
    "sync_gradients": {"encoding": (None, "one of its class?")},
    "gather_examples": {"x": (TREE, "arrays")},
    "on_matrices": {"function": (jnp.tanh, "a function"), "tree": (TREE, "arrays")},
    "global_mean": {"x": (TREE, "arrays")},
    "unpad": {"length": (3, "a count or 0")},
    "weighted_loss": {"total": (1.0, "a number"), "weight": (2, "a number")},
    "weighted_mean": {"total": (1.0, "a number"), "weight": (2, "a number")},
    "unsharded_state": {"state": (SGD.init(TREE), "anything")},
}
# Values that are no functions, and records of values, which whoever is given them checks.
RECORDS = {
    *(
        "PLAIN",
        "StrategyConfig",
        "DataSet",
        "DryRun",
        "EvalOrder",
        "LoadedModel",
        "TrainOrder",
        "ShardDecision",
        "LossOutput",
        "LeafSharding",
        "Reduction",
        "ShardingRow",
        "Strategy",
    ),
    *("TrainState", "UsageError"),
}
