"""`research-dp sample`: what follows a prompt, with a cache of keys and values."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import research_dp
from research_dp.commands.sample import drawn, of_run
from research_dp.distributed.sharding import by_path
from research_dp.models.transformer import transformer
from research_dp.runs import published, tensor_files
from research_dp.sample import main as sample
from tests.support import published_models as models
from tests.support.marks import exhaustive
from tests.support.published_models import folder_of

BYTES = {**models.config("llama"), "vocab_size": 256}


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama", exhaustive("qwen3")])
def test_a_cache_gives_the_logits_of_all_tokens_at_once(name, tmp_path):
    """The prompt in two parts, then a token at a time; beyond the windows."""
    model, params = research_dp.load_hf(folder_of(name, tmp_path))
    tokens = models.tokens()
    expected = model.apply(params, tokens)
    logits, cache = model.decode(params, tokens[:, :7], tokens.shape[1])
    np.testing.assert_allclose(logits, expected[:, 6], atol=1e-5)
    logits, cache = model.decode(params, tokens[:, 7:9], cache)
    step = jax.jit(model.decode)
    for at in range(9, tokens.shape[1]):
        np.testing.assert_allclose(logits, expected[:, at - 1], atol=1e-5)
        logits, cache = step(params, tokens[:, at : at + 1], cache)
    np.testing.assert_allclose(logits, expected[:, -1], atol=1e-5)


def test_greedy_tokens_are_the_likeliest_and_others_are_drawn(tmp_path):
    model, params = research_dp.load_hf(folder_of("llama", tmp_path))
    found = list(drawn(model, params, [3, 5], 6, 0.0, 0))
    given = [3, 5]
    for token in found:
        assert int(jnp.argmax(model.apply(params, np.array([given]))[0, -1])) == token
        given.append(token)
    some = {tuple(drawn(model, params, [3, 5], 6, 1.0, seed)) for seed in (0, 1)}
    assert len(some) == 2 and tuple(drawn(model, params, [3, 5], 6, 1.0, 1)) in some


def test_bytes_are_printed_as_they_are_drawn(tmp_path, capfd):
    path = tiny_bytes(tmp_path, BYTES)
    assert sample([str(path), "--prompt=de", "--tokens=5", "--temperature=0"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("de") and out.endswith("\n") and not err
    assert len(out) > 3


def tiny_bytes(folder, options):
    """A published model of 256 tokens."""
    given = published.options_of(options)
    shapes = {"tokens": jax.ShapeDtypeStruct((1, 4), jnp.int32)}
    params, _ = transformer(**given).init(jax.random.key(0), shapes)
    rows = published.FAMILIES["llama"].rows_of(given)
    (folder / "config.json").write_text(json.dumps(options))
    tensor_files.write(folder, tensor_files.separated(rows, by_path(params)), {"format": "pt"})
    return folder


def test_a_tokenizer_of_the_folder_is_used(tmp_path, capfd):
    tokenizers = pytest.importorskip("tokenizers")
    path = folder_of("llama", tmp_path)
    known = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")
    )
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known.save(str(path / "tokenizer.json"))
    assert sample([str(path), "--prompt=w3 w5", "--tokens=4", "--temperature=0"]) == 0
    model, params = research_dp.load_hf(path)
    words = [f"w{i}" for i in drawn(model, params, [3, 5], 4, 0.0, 0)]
    assert capfd.readouterr().out == f"w3 w5 {' '.join(words)}\n"


@pytest.mark.parametrize(
    ("bound", "found"),
    [("'a/b.json'", "a/b.json"), ("%PATH", "a"), ("%NONE", None), ("%LOOP", None), ("None", None)],
)
def test_a_run_says_which_tokenizer_its_text_has(bound, found, tmp_path):
    lines = f"PATH = 'a'\nLOOP = %LOOP\nimport no_such_module\ntext_data.tokenizer = {bound}\n"
    (tmp_path / "config.gin").write_text(lines)
    assert of_run(tmp_path) == found
    assert of_run(tmp_path / "none") is None


def test_mistakes_are_told(tmp_path, capfd):
    path, of_bytes = folder_of("llama", tmp_path), tiny_bytes(tmp_path, BYTES)
    cases = {
        "the model has 64 tokens, which are no bytes": [path],
        "--prompt has no token": [of_bytes, "--prompt="],
        "--step is of a run's checkpoint": [path, "--step=3"],
        "config.json cannot be read": [path, f"--tokenizer={path / 'config.json'}"],
        "there is no such folder": [tmp_path / "none"],
    }
    for said, words in cases.items():
        assert sample([str(word) for word in words]) == 2
        assert said in capfd.readouterr().err
