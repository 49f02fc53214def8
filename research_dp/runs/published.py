"""Published models: `config.json` of Hugging Face's families, and the rows of their tensors.

A family says which options of `models.transformer` its configuration stands for, and back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from research_dp.errors import UsageError, printable, some_of
from research_dp.runs.manifest import Damaged
from research_dp.runs.tensor_files import Joined, Row, joined, tensors_in

CONFIG = "config.json"
Options = Mapping[str, Any]  # of `models.transformer`, and of a configuration

_LLAMA = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_width": "intermediate_size",
    "tied": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
_PLAIN = {"scale_embedding": False}


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of models that Hugging Face's transformers have.

    Attributes:
        architecture: Its class there.
        fields: Option -> name in the configuration.
        options: What all of the family have, where `models.transformer` has another default.
        defaults: Of what a configuration leaves out.
        fixed: What a configuration may say of what is not an option here, the first by default.
        rows: Options -> the rows of its tensors.
    """

    architecture: str
    fields: Mapping[str, str]
    options: Options
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Sequence[Any]]
    rows: Callable[[Mapping[str, Any]], list[Row]]


def _llama_rows(
    o: Options, mlp_norm: str = "post_attention_layernorm", prefix: str = "model."
) -> list[Row]:
    layer, sizes = f"{prefix}layers.*.", _qkv_sizes(o)
    qkv = [f"{layer}self_attn.{name}_proj" for name in "qkv"]
    rows = [
        Row("embed/table", f"{prefix}embed_tokens.weight"),
        Row("norm/scale", f"{prefix}norm.weight"),
        Row("blocks/attention_norm/scale", f"{layer}input_layernorm.weight"),
        Row("blocks/qkv/kernel", [f"{name}.weight" for name in qkv], True, sizes),
        Row("blocks/out/kernel", f"{layer}self_attn.o_proj.weight", True),
        Row("blocks/mlp_norm/scale", f"{layer}{mlp_norm}.weight"),
        Row("blocks/gate_up/kernel", [f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up")], True),
        Row("blocks/down/kernel", f"{layer}mlp.down_proj.weight", True),
    ]
    if o.get("biases") == "qkv":
        rows.append(Row("blocks/qkv/bias", [f"{name}.bias" for name in qkv], sizes=sizes))
    if o.get("query_key_norm"):
        rows.append(Row("blocks/query_norm/scale", f"{layer}self_attn.q_norm.weight"))
        rows.append(Row("blocks/key_norm/scale", f"{layer}self_attn.k_norm.weight"))
    return rows if o["tied"] else [*rows, Row("head/table", "lm_head.weight")]


def _gemma2_rows(o: Options) -> list[Row]:
    after = {"attention": "post_attention", "mlp": "post_feedforward"}
    return _llama_rows(o, "pre_feedforward_layernorm") + [
        Row(f"blocks/{half}_norm_after/scale", f"model.layers.*.{name}_layernorm.weight")
        for half, name in after.items()
    ]


def _gpt2_rows(o: Options) -> list[Row]:
    layer, rows = "transformer.h.*.", list[Row]()
    dense = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    for here, there in dense.items():
        rows.append(Row(f"blocks/{here}/kernel", f"{layer}{there}.weight"))
        rows.append(Row(f"blocks/{here}/bias", f"{layer}{there}.bias"))
    norms = {"blocks/attention_norm": f"{layer}ln_1", "blocks/mlp_norm": f"{layer}ln_2"}
    for here, there in {**norms, "norm": "transformer.ln_f"}.items():
        rows.append(Row(f"{here}/scale", f"{there}.weight"))
        rows.append(Row(f"{here}/bias", f"{there}.bias"))
    tables = {"embed": "transformer.wte.weight", "positions": "transformer.wpe.weight"}
    tables |= {} if o["tied"] else {"head": "lm_head.weight"}
    return rows + [Row(f"{here}/table", there) for here, there in tables.items()]


def _qkv_sizes(o: Options) -> list[int]:
    size = o.get("head_size") or o["width"] // o["heads"]
    return [size * n for n in (o["heads"], *[o.get("kv_heads") or o["heads"]] * 2)]


_NO_BIAS: dict[str, Sequence[Any]] = {"attention_bias": (False,), "mlp_bias": (False,)}
_SILU: dict[str, Sequence[Any]] = {"hidden_act": ("silu",)}
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        _LLAMA,
        _PLAIN,
        _LLAMA_DEFAULTS,
        {**_SILU, **_NO_BIAS, "pretraining_tp": (1,)},
        _llama_rows,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {**_LLAMA, "window": "sliding_window"},
        _PLAIN,
        {**_LLAMA_DEFAULTS, "sliding_window": 4096, "num_key_value_heads": 8},
        _SILU,
        _llama_rows,
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA,
        {**_PLAIN, "biases": "qkv"},
        {**_LLAMA_DEFAULTS, "num_key_value_heads": 32},
        {**_SILU, "use_sliding_window": (False,)},
        _llama_rows,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _LLAMA,
        {**_PLAIN, "query_key_norm": True},
        {**_LLAMA_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
        {**_SILU, **_NO_BIAS, "use_sliding_window": (False,)},
        _llama_rows,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            **_LLAMA,
            "window": "sliding_window",
            "score_cap": "attn_logit_softcapping",
            "logit_cap": "final_logit_softcapping",
        },
        {
            "norm": "rms_plus_1",
            "norm_after": True,
            "mlp": "geglu",
            "window_each": 2,
        },
        {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
        {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)},
        _gemma2_rows,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "vocab_size": "vocab_size",
            "width": "n_embd",
            "depth": "n_layer",
            "heads": "n_head",
            "mlp_width": "n_inner",
            "tied": "tie_word_embeddings",
            "norm_epsilon": "layer_norm_epsilon",
            "max_positions": "n_positions",
        },
        {**_PLAIN, "norm": "layer", "biases": "all", "mlp": "gelu"},
        {
            **{
                "vocab_size": 50257,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_positions": 1024,
            },
            **{"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        },
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        _gpt2_rows,
    ),
}


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's configuration. Raises Damaged, or OSError."""
    if not (folder / CONFIG).is_file():
        raise Damaged(f"it has no {CONFIG}")
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise Damaged(f"{CONFIG} is no JSON: {printable(str(error))}") from error
    if not isinstance(config, dict) or config.get("model_type") not in FAMILIES:
        kind = config.get("model_type") if isinstance(config, dict) else None
        known = ", ".join(FAMILIES)
        raise Damaged(f"model_type = {kind!r} in {CONFIG} is none of {known}")
    return config


def options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `models.transformer` that a configuration stands for.

    Raises:
        Damaged: It says something that the decoder here does not compute.
    """
    kind = config["model_type"]
    family = FAMILIES[kind]
    given = {**family.defaults, **{k: v for k, v in config.items() if v is not None or k in _NULL}}
    problems = [
        f"{name} = {given[name]!r}"
        for name, known in family.fixed.items()
        if given.get(name, known[0]) not in known
    ]
    options: dict[str, Any] = {k: given.get(there) for k, there in family.fields.items()}
    options |= family.options
    if kind == "gpt2":
        options["mlp_width"] = options["mlp_width"] or 4 * options["width"]
    else:
        options |= _rotary_options(given, problems)
    if kind == "gemma2":
        options["score_scale"] = given["query_pre_attn_scalar"] ** -0.5
    problems += [f"{there} is missing" for there in _missing(family, options)]
    windows = given.get("layer_types")
    if windows and windows != _layer_types(options):
        problems.append(f"layer_types = {some_of(windows, 3)}")
    if problems:
        raise Damaged(f"{CONFIG} of a {kind} has {some_of(problems, 5)}, which is not supported")
    return {name: x for name, x in options.items() if x is not None}


_NULL = {"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
_OPTIONAL = {"kv_heads", "head_size", "window", "score_cap", "logit_cap", "mlp_width"}


def _missing(family: Family, options: Options) -> list[str]:
    """Names in the configuration of what has no default there."""
    needed = family.fields.keys() - _OPTIONAL | ({"mlp_width"} & family.fields.keys())
    return [family.fields[name] for name in sorted(needed) if options[name] is None]


def _layer_types(o: Options) -> list[str]:
    """Which layers have a window, as a configuration lists them."""
    each, has = o.get("window_each", 1), o.get("window") is not None
    names = "full_attention", "sliding_attention"
    return [names[has and layer % each == 0] for layer in range(o["depth"])]


def _rotary_options(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Those of rotary positions, as older and newer configurations have them."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    options = {"rotary_base": float(rope.get("rope_theta", given.get("rope_theta", 10_000.0)))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    factors = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if kind == "llama3" and factors == (1.0, 4.0):
        options["rotary_stretch"] = float(rope["factor"])
        options["rotary_length"] = rope["original_max_position_embeddings"]
    elif kind != "default":
        problems.append(f"rotary positions {dict(rope)}")
    return options


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


_SIZES = "vocab_size", "width", "depth", "heads", "mlp_width"
# Those of `models.transformer`.
_DEFAULTS = {
    **{"tied": False, "kv_heads": None, "head_size": None, "biases": "none", "norm": "rms"},
    **{"norm_epsilon": 1e-6, "norm_after": False, "query_key_norm": False, "mlp": "swiglu"},
    **{"scale_embedding": True, "max_positions": None, "rotary_base": 10_000.0},
    **{"rotary_stretch": 1.0, "rotary_length": 8192, "window": None, "window_each": 1},
    **{"score_scale": None, "score_cap": None, "logit_cap": None},
}


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
        config["query_pre_attn_scalar"] = round(scale, 6)
        config["layer_types"] = _layer_types({**o, "window_each": 2})
    return config


def read(folder: Path, rows: Sequence[Row] | None = None) -> dict[str, Joined]:
    """The parameters that a folder's tensors are, by path, by its family's rows or by others.

    Raises:
        Damaged: It is no such folder, or tensors are missing, left over, or do not fit.
        OSError: It cannot be read.
    """
    if rows is None:
        config = read_config(folder)
        rows = FAMILIES[config["model_type"]].rows(options_of(config))
    tensors = tensors_in(folder)
    if rows[0].parts[0].startswith("transformer.") and "wte.weight" in tensors:
        tensors = {f"transformer.{name}": x for name, x in tensors.items()}  # of the first GPT-2
    return joined(rows, tensors)
