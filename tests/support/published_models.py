"""Tiny models of published families with random weights, and what transformers computes of them.

python -m tests.support.published_models   # records; needs torch and transformers
"""

import json
import zlib

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.support.repository import ROOT

RECORDED = ROOT / "tests" / "models" / "published_models.safetensors"
VOCAB, LENGTH = 64, 24
_LLAMA = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
_STRETCHED = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama": {**_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "rope_scaling": _STRETCHED},
    "llama_tied": {**_LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "mistral": {**_LLAMA, "sliding_window": 5, "num_key_value_heads": 1},
    "qwen2": {**_LLAMA, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3": {**_LLAMA, "head_dim": 16, "tie_word_embeddings": False},
    "gemma2": {
        **_LLAMA,
        **{"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    },
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
}


def config(name):
    """The configuration of a case, as its file has it."""
    return {"model_type": name.partition("_")[0], **CONFIGS[name]}


def tokens():
    """Without 0, for which some families pad: transformers gives its embedding no gradient."""
    return np.random.default_rng(0).integers(1, VOCAB, (2, LENGTH)).astype(np.int32)


def values(name, shape):
    """Values of a tensor, by its name: of norms near those that they begin with."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (rng.normal(size=shape) * (0.2 if len(shape) == 1 else 0.3)).astype(np.float32)


def along(name, x):
    """A gradient's norm, and its part along a random direction."""
    direction = np.random.default_rng(zlib.crc32(name.encode()) + 1).normal(size=x.shape)
    return np.float32([np.linalg.norm(x), np.vdot(x, direction)])


def recorded(name):
    """(weights by name, logits, loss, parts of gradients by name) of a case."""
    found = {k.removeprefix(f"{name}/"): x for k, x in load_file(RECORDED).items()}
    parts = {k.partition("/")[2]: x for k, x in found.items() if k.startswith("along/")}
    shapes = {k.partition("/")[2]: x for k, x in found.items() if k.startswith("shape/")}
    weights = {k: values(k, tuple(shape)) for k, shape in shapes.items()}
    return weights, found["logits"], found["loss"], parts


def folder_of(name, path, files=1):
    """A folder of a case, in one file or in several."""
    weights, path = recorded(name)[0], path / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config(name)))
    if files == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = sorted(weights)
    named = {key: f"part-{number % files}.safetensors" for number, key in enumerate(names)}
    for file in set(named.values()):
        save_file({k: weights[k] for k in names if named[k] == file}, path / file)
    index = {"weight_map": named}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def computed(name):
    """What transformers computes of a case: its tensors by the names of `recorded`."""
    import torch
    import transformers

    made = transformers.AutoConfig.for_model(**config(name))
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    model.eval()
    given, found = dict(model.named_parameters()), {}
    with torch.no_grad():
        for key, x in given.items():
            x.copy_(torch.from_numpy(values(key, tuple(x.shape))))
    ids = torch.from_numpy(tokens().astype(np.int64))
    out = model(ids, labels=ids)
    out.loss.backward()
    found["logits"], found["loss"] = out.logits.detach().numpy(), out.loss.detach().numpy()
    for key, x in given.items():
        found[f"along/{key}"] = along(key, x.grad.numpy())
        found[f"shape/{key}"] = np.int32(x.shape)
    return {key: np.array(x, order="C") for key, x in found.items()}


if __name__ == "__main__":
    save_file({f"{n}/{k}": x for n in CONFIGS for k, x in computed(n).items()}, RECORDED)
