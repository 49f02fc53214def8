"""Published models: `config.json` of Hugging Face's families, and the rows of their tensors.

A family, in published.toml, says which options of `models.transformer` its configuration stands
for, and which tensors a parameter is made of. Both directions read the same tables.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research_dp.argument_types import is_integer, is_number
from research_dp.errors import UsageError, printable, some_of
from research_dp.runs.manifest import Damaged
from research_dp.runs.tensor_files import Joined, Row, joined, tensors_in

CONFIG = "config.json"
ADAPTER = re.compile(r".*_lora_[ab]/.*")  # of a dense layer, which no folder has
Options = Mapping[str, Any]  # of `models.transformer`, and of a configuration

# Of the decoder, and their defaults, but those that every configuration has.
_SIZES = "vocab_size", "width", "depth", "heads", "mlp_width"
_DEFAULTS = {
    **{"tied": False, "kv_heads": None, "head_size": None, "biases": "none", "norm": "rms"},
    **{"norm_epsilon": 1e-6, "norm_after": False, "query_key_norm": False, "mlp": "swiglu"},
    **{"scale_embedding": True, "max_positions": None, "rotary_base": 10_000.0},
    **{"rotary_stretch": 1.0, "rotary_length": 8192, "window": None, "window_each": 1},
    **{"score_scale": None, "score_cap": None, "logit_cap": None},
}
# Of which a configuration says by null that there is none.
_NULLABLE = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
_NULLABLE |= {"num_key_value_heads"}
_OPTIONAL = {"kv_heads", "head_size", "window", "score_cap", "logit_cap"}


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of models that Hugging Face's transformers have; see published.toml."""

    architecture: str
    fields: Mapping[str, str]
    options: Options
    rows: Mapping[str, Sequence[str]]
    fixed: Mapping[str, Sequence[Any]]
    defaults: Options
    transposed: bool = True

    def rows_of(self, options: Options) -> list[Row]:
        """The rows of a model with these options."""
        o = complete(options)
        sizes = [o["head_size"] * n for n in (o["heads"], o["kv_heads"], o["kv_heads"])]
        return [
            Row(
                path,
                names,
                self.transposed and path.endswith("kernel"),
                sizes if path.startswith("blocks/qkv/") and len(names) > 1 else None,
            )
            for path, names in self.rows.items()
            if path != "head/table" or not o["tied"]
        ]


def _families() -> dict[str, Family]:
    read: dict[str, Any] = {}
    for kind, own in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
        like = read.get(own.pop("like", ""), {})
        tables = {name: {**x, **own.get(name, {})} for name, x in like.items() if type(x) is dict}
        read[kind] = {**own, **tables}
    return {kind: Family(**given) for kind, given in read.items()}


FAMILIES = _families()


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's configuration, of a known family. Raises Damaged, or OSError."""
    config = json_of(folder)
    if (kind := config.get("model_type")) not in list(FAMILIES):
        raise Damaged(f"model_type = {kind!r} in {CONFIG} is none of {', '.join(FAMILIES)}")
    return config


def json_of(folder: Path) -> dict[str, Any]:
    """A folder's configuration. Raises Damaged, or OSError."""
    if not (folder / CONFIG).is_file():
        raise Damaged(f"it has no {CONFIG}")
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise Damaged(f"{CONFIG} is no JSON: {printable(str(error))}") from error
    if not isinstance(config, dict):
        raise Damaged(f"{CONFIG} is no JSON object")
    return config


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `models.transformer` that a configuration stands for.

    Raises:
        Damaged: It says something that the decoder here does not compute.
    """
    kind = config["model_type"]
    family = FAMILIES[kind]
    given = {
        **family.defaults,
        **{k: v for k, v in config.items() if v is not None or k in _NULLABLE},
    }
    problems = [
        f"{name} = {given[name]!r}"
        for name, known in family.fixed.items()
        if given.get(name, known[0]) not in known
    ]
    options: dict[str, Any] = {k: given.get(there) for k, there in family.fields.items()}
    options |= family.options
    if kind == "gpt2" and options["mlp_width"] is None and is_integer(options["width"]):
        options["mlp_width"] = 4 * options["width"]
    for name, there in family.fields.items():
        if not _is_right(name, options[name]):
            is_absent = options[name] is None
            problems.append(f"no {there}" if is_absent else f"{there} = {options[name]!r}")
    if kind != "gpt2":
        options |= _rotary_options(given, problems)
    if kind == "gemma2":
        scalar = given["query_pre_attn_scalar"]
        is_right = is_number(scalar) and scalar > 0
        options["score_scale"] = scalar**-0.5 if is_right else None
        problems += [] if is_right else [f"query_pre_attn_scalar = {scalar!r}"]
    windows = given.get("layer_types")
    if windows is not None and not problems and windows != _layer_types(options):
        problems.append(f"layer_types = {printable(str(windows))}")
    if problems:
        raise Damaged(f"{CONFIG} of a {kind} has {some_of(problems, 5)}, which is not supported")
    return {name: x for name, x in options.items() if x is not None}


def _is_right(name: str, value: Any) -> bool:
    """Whether an option has a value that a decoder can have."""
    if value is None:
        return name in _OPTIONAL
    if name == "tied":
        return isinstance(value, bool)
    is_float = name in ("norm_epsilon", "score_cap", "logit_cap")
    return (is_number(value) if is_float else is_integer(value)) and value > 0


def _layer_types(o: Options) -> list[str]:
    """Which layers have a window, as a configuration lists them."""
    each, has = o.get("window_each", 1), o.get("window") is not None
    names = "full_attention", "sliding_attention"
    return [names[has and layer % each == 0] for layer in range(o["depth"])]


def _rotary_options(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Those of rotary positions, as older and newer configurations have them."""
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {"rope_type": rope}
    stretch: Any
    length: Any
    base = rope.get("rope_theta", given.get("rope_theta", _DEFAULTS["rotary_base"]))
    kind = rope.get("rope_type", rope.get("type", "default"))
    stretch, length = (
        (rope.get("factor"), rope.get("original_max_position_embeddings"))
        if kind == "llama3"
        else (1.0, _DEFAULTS["rotary_length"])
    )
    factors = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    is_known = kind == "default" or (kind == "llama3" and factors == (1.0, 4.0))
    is_nested = any(isinstance(x, dict) for x in rope.values())
    numbers = is_number(base) and is_number(stretch) and is_integer(length)
    if not is_known or is_nested or not numbers or rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"rotary positions {rope or base}")
        return {}
    return {
        **{"rotary_base": float(base), "rotary_stretch": float(stretch)},
        "rotary_length": length,
    }


def complete(options: Options) -> dict[str, Any]:
    """All options of a decoder's form, also those that are the default; the same if it is."""
    o = {**_DEFAULTS, **options}
    o["kv_heads"] = o["kv_heads"] or o["heads"]
    o["head_size"] = o["head_size"] or o["width"] // o["heads"]
    if o["max_positions"]:
        o["rotary_base"] = _DEFAULTS["rotary_base"]
    if o["rotary_stretch"] == 1:
        o["rotary_length"] = _DEFAULTS["rotary_length"]
    if o["window"] is None:
        o["window_each"] = 1
    if o["score_scale"] == o["head_size"] ** -0.5:
        o["score_scale"] = None
    return {name: o[name] for name in (*_SIZES, *_DEFAULTS)}


def differences(found: Options, expected: Options) -> list[str]:
    """Options that two decoders differ in, with what each has."""
    pairs = ((name, x, complete(expected)[name]) for name, x in complete(found).items())
    return [f"{name} {x} in place of {y}" for name, x, y in pairs if x != y]


def family_of(options: Options) -> str:
    """The family whose configurations stand for these options.

    Raises:
        UsageError: There is none.
    """
    nearest: tuple[str, list[str]] | None = None
    for kind in FAMILIES:
        apart = differences(options_of(config_of(kind, options)), options)
        if not apart:
            return kind
        if nearest is None or len(apart) < len(nearest[1]):
            nearest = kind, apart
    assert nearest
    raise UsageError(
        f"no published family is this decoder: the nearest, {nearest[0]}, has "
        f"{some_of(nearest[1], 5)}."
    )


def config_of(kind: str, options: Options) -> dict[str, Any]:
    """A family's configuration, with the options that it has; the inverse of `options_of`."""
    family, o = FAMILIES[kind], complete(options)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": kind,
        "dtype": "float32",
    }
    config |= {name: known[0] for name, known in family.fixed.items()}
    config |= {there: o[name] for name, there in family.fields.items()}
    if kind == "gpt2":
        return config | {"n_positions": o["max_positions"] or family.defaults["n_positions"]}
    config["rope_theta"], config["rope_scaling"] = o["rotary_base"], None
    if o["rotary_stretch"] != 1:
        config["rope_scaling"] = {
            **{"rope_type": "llama3", "factor": o["rotary_stretch"]},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": o["rotary_length"],
        }
        length = int(o["rotary_stretch"] * o["rotary_length"])
        config["max_position_embeddings"] = length
    if kind == "gemma2":
        scale = (o["score_scale"] or o["head_size"] ** -0.5) ** -2
        config["query_pre_attn_scalar"] = round(scale)  # transformers takes integers alone
        config["layer_types"] = _layer_types({**o, "window_each": 2})
    return config


def merged(params: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Parameters by path without adapters: kernels have what these add, in float32."""
    base = {path: x for path, x in params.items() if not ADAPTER.fullmatch(path)}
    for narrow in params.keys() - base.keys():
        if "_lora_a/" in narrow:
            path, wide = narrow.replace("_lora_a/", "/"), narrow.replace("_lora_a/", "_lora_b/")
            kernel, a, b = (np.asarray(params[x], np.float32) for x in (path, narrow, wide))
            base[path] = kernel + np.float32(options["lora_alpha"] / options["lora_rank"]) * (a @ b)
    return base


def read(
    folder: Path,
    rows: Sequence[Row],
    skipped: Callable[[str], bool],
) -> dict[str, Joined]:
    """The parameters that a folder's tensors are, by path; see `tensor_files.joined`.

    Raises:
        Damaged: It is no such folder, or tensors are missing, left over, or do not fit.
        OSError: It cannot be read.
    """
    tensors = tensors_in(folder)
    if rows[0].parts[0].startswith("transformer.") and "wte.weight" in tensors:
        tensors = {f"transformer.{name}": x for name, x in tensors.items()}  # of the first GPT-2
    return joined(rows, tensors, skipped)
