"""The strategies' tables of README.md and docs/strategies.md, and the costs `certify` checks."""

import inspect
import itertools
import os
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from research_dp import strategies
from research_dp.config import gin_internals, load
from research_dp.distributed.mesh import DATA_AXIS, FSDP_AXIS
from research_dp.strategies import StrategyConfig

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "strategies.md"
COSTS = ROOT / "research_dp" / "certification" / "costs.toml"
BEGIN, END = "<!-- strategies: python tools/generate.py -->\n", "<!-- end of strategies -->\n"
WHEN = " When to use it: "
SHORT = ("strategy", "sharded", "wire bytes per step", "known as")
LONG = (
    "file",
    "parameters",
    "gradients",
    "optimizer state",
    "wire bytes per step",
    "when to use it",
)
# What other systems call a strategy.
KNOWN_AS = {
    "ddp": "PyTorch DDP, FSDP1 `NO_SHARD`, JAX `pmap` and `psum`",
    "spmd": "JAX `jit` with `NamedSharding` (GSPMD)",
    "zero1": "ZeRO-1 (DeepSpeed stage 1), `ZeroRedundancyOptimizer`",
    "zero2": "ZeRO-2 (DeepSpeed stage 2)",
    "fsdp": "ZeRO-3 (DeepSpeed stage 3), FSDP1 `FULL_SHARD`, FSDP2 `fully_shard`",
    "fsdp_keep": "FSDP1 `SHARD_GRAD_OP`, FSDP2 `reshard_after_forward=False`",
    "hsdp": "FSDP1 `HYBRID_SHARD`, MiCS",
    "hsdp_zero1": "FSDP1 `HYBRID_SHARD`, with ZeRO-1 across groups",
    "spmd_fsdp": "GSPMD: T5X, MaxText axis `fsdp`",
}
# What each function does with gradients; of one that is not here, nothing is known.
KNOWN = {
    inspect.unwrap(strategies.shard_params): "",
    inspect.unwrap(strategies.gather_params): "",
    inspect.unwrap(strategies.sync_gradients): "all-reduced in buckets",
    inspect.unwrap(strategies.scatter_gradients): "reduce-scattered",
    inspect.unwrap(strategies.apply_gradients): "",
    inspect.unwrap(strategies.fsdp_apply_gradients): "",
}
SHARDED, REPLICATED = "sharded", "replicated"


class Row(NamedTuple):
    """A row of the table: what a strategy's file and its configuration say."""

    name: str
    params: str
    gradients: str
    opt_state: str
    wire_bytes: str
    when: str
    counted: bool  # whether a test counts the wire bytes in the traced program
    sharded: tuple[str, ...] = ()  # what is sharded between micro-batches


def rows() -> list[Row]:
    """Returns the rows of all strategy files; those that keep everything replicated come first."""
    jax.config.update("jax_num_cpu_devices", 8)
    result = []
    for file in sorted((ROOT / "gin" / "strategies").glob("*.gin")):
        load.reset()
        load.load([str(file)])
        header = itertools.takewhile(lambda line: line[:1] == "#", file.read_text().splitlines())
        _, _, when = " ".join(line.removeprefix("# ") for line in header).partition(WHEN)
        result.append(row(gin_internals.value_of("train.strategy"), when))
    load.reset()
    return sorted(result, key=lambda r: (r.name != "single", r.params[0] == "s", r.opt_state))


def row(config: StrategyConfig, when: str) -> Row:
    """Returns the row of one strategy."""
    by_compiler = inspect.unwrap(config.engine) is inspect.unwrap(strategies.compiled)
    scattered = False  # whether gradients are sharded between micro-batches
    groups = min(config.mesh.shape[DATA_AXIS], config.mesh.shape[FSDP_AXIS]) > 1
    params = opt_state = SHARDED if config.shard else REPLICATED
    if config.mesh.size == 1:
        params = "unsharded, 1 device"
        gradients = opt_state = "unsharded"
        wire_bytes = "0"
    elif by_compiler:
        scattered = bool(config.shard)
        gradients = f"the compiler's {'reduce-scatter' if config.shard else 'all-reduce'}"
        wire_bytes = f"{3 if config.shard else 2} P f (k = 1)"
    elif config.gather:
        params += " in groups, replicated across" if groups else ""
        gradients, scattered = "reduce-scattered", config.reshard_after_forward
        if config.reshard_after_forward:
            params, wire_bytes = f"{params}, gathered again for the backward pass", "3 k P f"
        else:
            params, wire_bytes = f"{params}, gathered once a step", "2 P f"
            gradients += " once a step"
        if groups:
            over_all = len(config.state_axes) > 1
            gradients += f", then {'scattered' if over_all else 'all-reduced'} across groups"
            opt_state += " over all devices" if over_all else ""
            wire_bytes += " inside, 2 P / s across"
    else:
        params, sync = REPLICATED, inspect.unwrap(config.sync)
        gradients, wire_bytes = KNOWN.get(sync, f"by `{sync.__name__}`"), "2 P f"
        if config.sync_each == "step":
            gradients += ", once a step"
        else:
            gradients += ", each micro-batch"
            scattered = sync is inspect.unwrap(strategies.scatter_gradients)
            wire_bytes = "(k + 1) P f" if config.shard else "2 k P f"
    slots = (config.shard, config.gather, config.sync, config.update)
    known = all(slot is None or inspect.unwrap(slot) in KNOWN for slot in slots)
    wire_bytes = wire_bytes if known else "not known"
    counted = known and (config.mesh.size == 1 or not by_compiler)
    kinds = {
        "parameters": params.startswith(SHARDED),
        "gradients": scattered,
        "optimizer state": opt_state.startswith(SHARDED),
    }
    sharded = tuple(kind for kind, yes in kinds.items() if yes)
    return Row(config.name, params, gradients, opt_state, wire_bytes, when, counted, sharded)


def pages() -> dict[Path, str]:
    """Returns the text of README.md, of docs/strategies.md, and of the file of costs."""
    found = rows()
    short = [
        (
            f"`{one.name}`",
            ", ".join(one.sharded) or "nothing",
            one.wire_bytes,
            KNOWN_AS.get(one.name, ""),
        )
        for one in found
    ]
    long = [(f"`{one.name}`", *one[1:6]) for one in found]
    costs = ["# Generated by tools/generate.py: what a device stores, and sends in a step.\n"]
    for one in found:
        if one.counted:
            costs.append(f"\n[{one.name}]\nwire_bytes = '{one.wire_bytes}'\n")
            for part in ("params", "opt_state"):
                sharded = getattr(one, part).startswith(SHARDED)
                costs.append(f"{part} = '{SHARDED if sharded else REPLICATED}'\n")
    return {
        README: with_table(README, [SHORT, *short]),
        GUIDE: with_table(GUIDE, [LONG, *long]),
        COSTS: "".join(costs),
    }


def with_table(page: Path, cells: list[tuple[str, ...]]) -> str:
    """Returns a page with a new table between its marks; the first row of cells is the header."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    lines = [f"| {' | '.join(row)} |\n" for row in cells]
    lines.insert(1, "|---" * len(cells[0]) + "|\n")
    return before + BEGIN + "".join(lines) + END + after
