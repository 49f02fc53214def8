"""Finds what a user meant by a name that does not exist, across the spellings of other systems."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import PurePath

# What others call the shipped strategies, in small letters and digits alone.
_STRATEGIES = {
    "single": ("oracle", "reference", "onedevice", "nodp"),
    "ddp": ("dataparallel", "distributeddataparallel", "dp", "noshard", "replicated", "zero0"),
    "fsdp": (
        *("zero", "zero3", "zerostage3", "stage3", "fullshard", "fsdp1", "fsdp2", "fullyshard"),
        *("fullysharded", "fullyshardeddataparallel", "sharded", "deepspeed"),
    ),
    "fsdp_keep": ("shardgradop", "reshardafterforwardfalse", "noreshard", "fsdpnoreshard"),
    "hsdp": ("hybridshard", "hybridshardzero2", "hybrid", "mics", "zeropp", "hpz"),
    "zero1": ("zerostage1", "stage1", "zeroredundancyoptimizer", "shardedoptimizer"),
    "zero2": ("zerostage2", "stage2", "shardedddp"),
    "spmd": ("gspmd", "pjit", "jit", "shardy", "auto"),
    "spmd_fsdp": ("gspmdfsdp", "pjitfsdp", "jitfsdp", "fsdpspmd"),
}
_BY_ALIAS = {alias: name for name, aliases in _STRATEGIES.items() for alias in aliases}
# What to type, where {} is the value -> flags of other systems, as `plain` writes them.
_FLAGS = {
    "--gin_file=strategies/{}.gin": "strategy",
    "--gin_file=models/{}.gin": "model",
    "--gin_file=data/{}.gin": "data dataset",
    "--gin.train.num_steps={}": "numsteps steps maxsteps trainsteps iterations",
    "--gin.train.batch_size={}": "batchsize batch bs globalbatchsize",
    "--gin.train.accumulation_steps={}": "accumulationsteps gradientaccumulationsteps",
    "--gin.train.max_grad_norm={}": "maxgradnorm gradientclipping clipgradnorm",
    "--gin.train.checkpoint_every={}": "checkpointevery savesteps saveevery",
    "--gin.train.eval_every={}": "evalevery evalsteps",
    "--gin.train.log_every={}": "logevery loggingsteps",
    "--gin.train.seed={}": "seed randomseed",
    "A run trains one strategy: --gin_file=strategies/NAME.gin. To train several: "
    "`compare --strategies={}`.": "strategies",
    "The optimizer has it: --gin.warmup_cosine.peak_value={} with optim/adamw_cosine.gin; "
    "`list optimizers` names others.": "lr learningrate",
    "A run counts steps, of which an epoch has examples / batch size: "
    "--gin.train.num_steps=N.": "epochs numepochs maxepochs numtrainepochs",
    "A run continues by itself when it gets the same --workdir.": "resume resumefrom continue",
    "It is a file, such as --gin_file=precision/bf16_params.gin; `list options` has all.": "bf16 "
    "fp16 precision mixedprecision dtype",
}
_BY_FLAG = {name: text for text, names in _FLAGS.items() for name in names.split()}


def plain(name: str) -> str:
    """A name without what spellings differ in: 'Zero-3' and 'zero_3' are 'zero3'."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def advice(flag: str, value: str) -> str | None:
    """A sentence on what to type for a flag that other systems have; None: it is not known."""
    text = _BY_FLAG.get(plain(flag), "")
    said = text.format(value or ("NAME" if "{}.gin" in text else "VALUE"))
    return f"Did you mean {said}?" if said.startswith("--") else said or None


def nearest_file(name: str, shipped: Iterable[str]) -> str | None:
    """The shipped file that a path or word means: 'zero3', 'FULL_SHARD.gin', 'fdsp'; or None."""
    files = list(shipped)
    stem = plain(PurePath(name).name.removesuffix(".gin"))
    stem = plain(_BY_ALIAS.get(stem, stem))
    same = [file for file in files if plain(PurePath(file).stem) == stem]
    if same:
        # E.g. runs/digits.gin rather than data/digits.gin, unless the folder is given.
        folders = {file: PurePath(file).parent.name for file in same}
        return max(same, key=lambda file: (folders[file] in name, folders[file] == "runs"))
    path = name.removeprefix("gin/")
    near = difflib.get_close_matches(path, files, n=1, cutoff=0.6)
    if not near:
        by_stem = {PurePath(file).stem: file for file in files}
        stems = difflib.get_close_matches(PurePath(path).stem, by_stem, n=1, cutoff=0.7)
        near = [by_stem[one] for one in stems]
    return near[0] if near else None
