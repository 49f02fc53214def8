"""Published weights: logits and gradients of transformers, folders there and back, mistakes."""

import json

import gin
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import research_dp
from research_dp import UsageError
from research_dp.distributed.placement import fingerprint
from research_dp.distributed.sharding import by_path
from research_dp.models.transformer import transformer
from research_dp.runs import published, tensor_files
from research_dp.strategies.frozen import freeze
from research_dp.strategies.strategy import init_key
from research_dp.training.initial import HfCheckpoint
from tests.support import decoder
from tests.support import published_models as models
from tests.support.compilers import AS_USERS_COMPILE
from tests.support.marks import exhaustive
from tests.support.published_models import folder_of
from tests.support.repository import ROOT

NAMES = list(models.CONFIGS)


@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_gradients_are_those_of_transformers(name, tmp_path):
    _, logits, loss, parts = models.recorded(name)
    model, params = research_dp.load_hf(folder_of(name, tmp_path))
    tokens = models.tokens()
    np.testing.assert_allclose(model.apply(params, tokens), logits, atol=1e-5)

    def mean(params):
        out = model.loss(params, {}, {"tokens": jnp.asarray(tokens)}, None, train=True)
        return out.total / out.weight

    found, grads = jax.value_and_grad(mean)(params)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    kind, config = models.config(name)["model_type"], models.config(name)
    rows = published.FAMILIES[kind].rows_of(published.options_of(config))
    flat = {path: np.asarray(x) for path, x in by_path(grads).items()}
    separated = dict(tensor_files.separated(rows, flat))
    assert separated.keys() == parts.keys()
    for key, x in separated.items():
        np.testing.assert_allclose(models.along(key, x), parts[key], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive  # torch is no extra: its wheels take 5 GB
@pytest.mark.parametrize("name", NAMES)
def test_what_is_recorded_is_what_transformers_computes(name):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    recorded = load_file(models.RECORDED)
    for key, x in models.computed(name).items():
        np.testing.assert_allclose(x, recorded[f"{name}/{key}"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["chunked", exhaustive("xla")])
@pytest.mark.parametrize("name", ["gemma2", "mistral", exhaustive("qwen3")])
def test_each_way_of_attention_computes_the_same(name, attention, tmp_path):
    path = folder_of(name, tmp_path)
    model, params = research_dp.load_hf(path, attention=attention, api="nnx")
    logits = models.recorded(name)[1]
    np.testing.assert_allclose(model.apply(params, models.tokens()), logits, atol=1e-5)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def run_of(folder, options, stem="fsdp", rate=0.0):
    """Arguments of a run from a folder."""
    given = {
        "train.initial": "@hf_checkpoint()",
        "hf_checkpoint.folder": str(folder),
        **{"train.num_steps": 1, "train.batch_size": 8, "shard_params.min_weight_size": 64},
    }
    given |= {f"transformer.{name}": value for name, value in options.items()}
    return {
        "gin_files": ["runs/lm_stdlib.gin", f"strategies/{stem}.gin"],
        "bindings": {**given, "transformer.remat": "full"},
        "data": research_dp.from_arrays({"tokens": np.tile(models.tokens()[:1], (16, 1))}),
        "optimizer": optax.sgd(rate),
        "allow_unused": True,
    }


def run_from(folder, workdir, options):
    return research_dp.run(**run_of(folder, options), workdir=workdir)


@pytest.mark.parametrize(
    ("name", "files"), [("llama", 2), exhaustive("gpt2", 1), exhaustive("gemma2", 1)]
)
def test_a_run_begins_with_a_folder_and_writes_one(name, files, tmp_path):
    given, back = folder_of(name, tmp_path, files), tmp_path / "out" / "back"
    run_from(given, tmp_path / "run", published.options_of(models.config(name)))
    research_dp.export(tmp_path / "run", back, hf=True)
    assert json.loads((back / "config.json").read_text()) == models.config(name)
    found = load_file(back / "model.safetensors")
    weights = models.recorded(name)[0]
    assert found.keys() == weights.keys()
    for key, x in found.items():
        np.testing.assert_array_equal(x, weights[key])
    with pytest.raises(UsageError, match="exists: give a new name"):
        research_dp.export(tmp_path / "run", back, hf=True)
    other = {**published.options_of(models.config(name)), "norm_epsilon": 0.5}
    with pytest.raises(UsageError, match=r"another model than train.model: norm_epsilon .* of 0.5"):
        run_from(given, tmp_path / "other", other)


ALL_BUT_ADAPTERS = "(?!.*_lora_).*"


@pytest.mark.parametrize("api", ["linen", exhaustive("nnx")])
def test_adapters_add_nothing_at_first_and_leave_the_rest_at_its_seed(api, tmp_path):
    options = {**published.options_of(models.config("qwen2")), "api": api}
    batch = {"tokens": jnp.asarray(models.tokens())}
    base, model = transformer(**options), transformer(**options, lora_rank=3)
    params, more = (x.init(jax.random.key(0), batch)[0] for x in (base, model))
    plain, found = by_path(params), by_path(more)
    assert len(found) == len(plain) + 2 * 4
    for path, x in found.items():
        if path in plain:
            np.testing.assert_array_equal(x, plain[path])
        else:
            assert x.any() == ("_lora_a/" in path)
    logits = (np.asarray(x.apply(p, batch["tokens"])) for x, p in ((base, params), (model, more)))
    assert next(logits).tobytes() == next(logits).tobytes()
    with pytest.raises(UsageError, match=r"transformer.lora_rank > 0: no folder has adapters"):
        research_dp.load_hf(folder_of("llama", tmp_path), lora_rank=2)


def test_adapters_are_trained_by_themselves_and_merged_where_they_are_exported(tmp_path):
    path, back = folder_of("llama", tmp_path), tmp_path / "back"
    options = {**published.options_of(models.config("llama")), "lora_rank": 2, "lora_alpha": 6.0}
    run = run_of(path, options, rate=0.5)
    run["bindings"] |= {"train.num_steps": 3, "train.frozen": ALL_BUT_ADAPTERS}
    research_dp.run(**run, workdir=tmp_path / "run")
    research_dp.export(tmp_path / "run", back, hf=True)
    model, params = research_dp.load(tmp_path / "run")
    base = by_path(research_dp.load_hf(path).params)
    tuned, merged = by_path(params), by_path(research_dp.load_hf(back).params)
    for name, x in base.items():
        np.testing.assert_array_equal(tuned[name], x)
        if name.endswith("kernel"):
            first, second = (tuned[name.replace("/k", f"_lora_{half}/k")] for half in "ab")
            added = np.stack([3.0 * (a @ b) for a, b in zip(first, second, strict=True)])
            assert np.abs(added).max() > 1e-4
            x = x + added
        np.testing.assert_allclose(merged[name], x, rtol=1e-6, atol=1e-7)
    tokens = models.tokens()
    expected = model.apply(params, tokens)
    plain = research_dp.load_hf(back)
    np.testing.assert_allclose(plain.model.apply(plain.params, tokens), expected, atol=1e-5)
    cached, _ = model.decode(params, tokens, tokens.shape[1])
    np.testing.assert_allclose(cached, expected[:, -1], atol=1e-5)


def test_a_table_is_rows(tmp_path):
    path = folder_of("gpt2", tmp_path)
    for table, said in (
        ([("a",)], r"\('a',\) is no row"),
        ([("a", [])], "is no row"),
        ([("a", "b", True, 3)], "is no row"),
        ([], "has no rows"),
        ([("a", "b"), ("c", "b")], "has b twice"),
    ):
        with pytest.raises(UsageError, match=said):
            HfCheckpoint(str(path), table)
    with pytest.raises(UsageError, match=r"it lacks none.0; no row takes .* and 32 more"):
        model = {"a": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
        HfCheckpoint(str(path), [("a", "none.*")]).read(model, model, {}, print)


def test_a_head_of_another_vocabulary_is_skipped(tmp_path):
    path = broken(folder_of("llama", tmp_path), drop=("lm_head.weight",))
    given = {**published.options_of(models.config("llama"))}
    strategy = decoder.build("ddp", transformer(**given))
    found = HfCheckpoint(str(path), skip=["head/.*"]).arrays(strategy, print)
    assert "head/table" not in found and len(found) == 8
    with pytest.raises(UsageError, match="it lacks lm_head"):
        HfCheckpoint(str(path)).arrays(strategy, print)


def test_what_is_loaded_has_the_dtypes_of_the_model(tmp_path):
    path = folder_of("llama", tmp_path)
    weights = load_file(path / "model.safetensors")
    narrow = {name: x.astype(ml_dtypes.bfloat16) for name, x in weights.items()}
    save_file(narrow, path / "model.safetensors")
    strategy = decoder.build("fsdp", transformer(**published.options_of(models.config("llama"))))
    for given in (None, strategy):
        params = research_dp.load_hf(path, strategy=given).params
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    expected = narrow["model.norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["norm"]["scale"], expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", exhaustive("gemma2"), exhaustive("qwen2")])
def test_a_folder_comes_back_byte_for_byte(name, tmp_path):
    given = folder_of(name, tmp_path)
    model, params = research_dp.load_hf(given)
    kind = published.family_of(model.config["transformer"])
    assert kind == models.config(name)["model_type"]
    rows = published.FAMILIES[kind].rows_of(model.config["transformer"])
    back = tmp_path / "back"
    back.mkdir()
    tensors = tensor_files.separated(rows, by_path(params))
    tensor_files.write(back, tensors, {"format": "pt"})
    assert bytes_of(back) == bytes_of(given)


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_comes_back(name):
    options = published.options_of(models.config(name))
    model = transformer(**options)
    kind = published.family_of(model.config["transformer"])
    again = published.options_of(published.config_of(kind, options))
    assert published.complete(again) == published.complete(model.config["transformer"])


def test_defaults_are_those_of_the_decoder():
    form = transformer(vocab_size=8, width=8, heads=2).config["transformer"]
    sizes = {name: form[name] for name in ("vocab_size", "width", "depth", "heads", "mlp_width")}
    assert published.complete(sizes) == published.complete(form)
    assert {*published.complete(sizes), "lora_rank", "lora_alpha"} == form.keys()
    none = {"kv_heads", "head_size"}
    given = {k: x for k, x in form.items() if k[:4] != "lora" and k not in none | sizes.keys()}
    assert given == {name: published.complete(sizes)[name] for name in given}


PARAMETERS = {
    "llama3_8b": 8_030_261_248,
    "llama3_2_1b": 1_235_814_400,
    "qwen2_0_5b": 494_032_768,
    "qwen3_0_6b": 596_049_920,
    "mistral_7b": 7_241_732_096,
    "gemma2_2b": 2_614_341_888,
    "gpt2_124m": 124_439_808,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_shipped_models_have_the_published_parameters_and_a_family(name):
    gin.parse_config_file(str(ROOT / "gin" / "models" / f"{name}.gin"), skip_unknown=True)
    model = gin.get_configurable("transformer")()
    tokens = {"tokens": jax.ShapeDtypeStruct((1, 8), jnp.int32)}
    params, _ = jax.eval_shape(lambda key: model.init(key, tokens), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == PARAMETERS[name]
    kind = published.family_of(model.config["transformer"])
    assert name.startswith(kind)
    rows = published.FAMILIES[kind].rows_of(model.config["transformer"])
    assert {row.path for row in rows} == by_path(params).keys()


def test_an_index_of_several_files_is_read_onto_shards(tmp_path):
    given = folder_of("llama", tmp_path, files=3)
    expected = by_path(research_dp.load_hf(given).params)
    options = published.options_of(models.config("llama"))
    strategy = decoder.build("fsdp", transformer(**options))
    _, params = research_dp.load_hf(given, strategy=strategy)
    for path, x in by_path(params).items():
        like = by_path(strategy.abstract_state.params)[path]
        assert x.sharding == like.sharding
        np.testing.assert_array_equal(x, expected[path])


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["zero1", exhaustive("fsdp"), exhaustive("ddp")])
def test_what_begins_with_a_folder_is_certified(stem, tmp_path):
    path = folder_of("llama", tmp_path)
    options = published.options_of(models.config("llama"))
    found = research_dp.certify(**run_of(path, options, stem), steps=1)
    assert found.certified, str(found)
    model, params = research_dp.load_hf(path)
    out = model.loss(params, {}, {"tokens": models.tokens()[:1]}, None, train=True)
    np.testing.assert_allclose(found.as_json()["steps"][0]["loss"], out.total / out.weight, 1e-5)


EXACT = ("single", "ddp", "zero1", "fsdp", "hsdp_zero1")  # others are much like these


@pytest.mark.slow
def test_strategies_that_begin_with_a_folder_end_with_the_same_bits(tmp_path):
    path, ends = folder_of("qwen2", tmp_path), {}
    model = transformer(**published.options_of(models.config("qwen2")))
    for stem in EXACT:
        options = f"data_parallel.compiler_options = {AS_USERS_COMPILE}"
        strategy = decoder.build(stem, model, options, more=["options/deterministic.gin"])
        arrays = HfCheckpoint(str(path)).arrays(strategy, print)
        state = strategy.init(init_key(0), arrays)
        for seed in range(3):
            batch = strategy.place_batch(decoder.batch(seed))
            state, _ = strategy.train_step(state, batch)
        ends[stem] = fingerprint(strategy.logical(jax.device_get(state)).params)
    assert len(set(ends.values())) == 1, ends


QUICK = [("gemma2", "fsdp"), ("gpt2", "spmd_fsdp"), ("qwen2", "fsdp")]
FOLLOWING = [
    (name, stem) if (name, stem) in QUICK else exhaustive(name, stem)
    for name in ("gemma2", "gpt2", "qwen2")
    for stem in ("fsdp", "spmd_fsdp", "zero1", "fsdp_keep", "hsdp")
]


@pytest.mark.parametrize(("name", "stem"), FOLLOWING)
def test_every_strategy_follows_single(name, stem):
    options = published.options_of(models.config(name))
    model = transformer(**options, dropout_rate=0.1, lora_rank=4 * (name == "qwen2"))
    if name == "qwen2":
        model = freeze(model, ALL_BUT_ADAPTERS, "train.frozen")
    born, numbers = decoder.run(decoder.build("single", model))
    found = decoder.run(decoder.build(stem, model))
    assert found[0] == born
    np.testing.assert_allclose(found[1], numbers, rtol=2e-5)


def broken(path, *, config=None, drop=(), add=None, **changes):
    """The folder, changed."""
    file = path / "model.safetensors"
    weights = {k: x for k, x in load_file(file).items() if k not in drop}
    save_file({**weights, **(add or {})}, file)
    given = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(config or json.dumps({**given, **changes}))
    return path


NORM = "model.norm.weight"
LAYER = "model.layers.1.mlp.up_proj.weight"
ROPE = models.CONFIGS["llama"]["rope_scaling"]
BAD_SHAPE = {"add": {LAYER: np.zeros((7, 32), np.float32)}}
MISTAKES = {
    "missing": ({"drop": (NORM, LAYER)}, ["it lacks", NORM, LAYER]),
    "surplus": ({"add": {"model.extra": np.zeros(3)}}, ["no row takes model.extra"]),
    "shape": (BAD_SHAPE, ["do not fit", f"{LAYER} F32 (7, 32)"]),
    "all": ({**BAD_SHAPE, "drop": (NORM,)}, [f"it lacks {NORM}; shapes", "(7, 32)"]),
    "dtype": ({"add": {LAYER: np.zeros((48, 32), np.float16)}}, ["do not fit", "F16 (48, 32)"]),
    "scalar": ({"add": {LAYER: np.array(1, np.float32)}}, ["do not fit", "F32 ()"]),
    "no JSON": ({"config": "{"}, ["config.json is no JSON"]),
    "list": ({"config": "[]"}, ["config.json is no JSON object"]),
    "family": ({"model_type": ["bert"]}, ["model_type = ['bert']", "llama"]),
    "activation": ({"hidden_act": "relu"}, ["hidden_act = 'relu'", "not supported"]),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["yarn"]),
    "text": ({"rope_scaling": "linear"}, ["linear"]),
    "factor": ({"rope_scaling": {**ROPE, "factor": "x"}}, ["'factor': 'x'"]),
    "length": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["llama3"]),
    "nested": ({"rope_scaling": {"full_attention": ROPE}}, ["full_attention"]),
    "other layers": ({"layer_types": ["sliding_attention"] * 3}, ["layer_types"]),
    "no layers": ({"layer_types": 3}, ["layer_types = 3"]),
    "tied": ({"tie_word_embeddings": True}, ["no row takes lm_head.weight"]),
    "size": ({"num_hidden_layers": None}, ["no num_hidden_layers"]),
    "heads": ({"num_attention_heads": "4"}, ["num_attention_heads = '4'"]),
    "rows": ({"vocab_size": 32}, ["embed/table is (32, 32) here and (64, 32) there"]),
    "fewer layers": ({"num_hidden_layers": 2}, ["is (2, 32) here and (3, 32) there"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_folder_that_does_not_fit_is_refused_in_words(case, tmp_path):
    change, said = MISTAKES[case]
    path = broken(folder_of("llama", tmp_path), **change)
    with pytest.raises(UsageError) as refused:
        research_dp.load_hf(path)
    for words in said:
        assert words in str(refused.value)


def test_other_folders_are_no_models(tmp_path):
    with pytest.raises(UsageError, match=r"it has no config\.json"):
        research_dp.load_hf(tmp_path)
    path = folder_of("llama", tmp_path)
    (path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UsageError, match=r"model\.safetensors: .*header"):
        research_dp.load_hf(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor"):
        research_dp.load_hf(path)
    for index, said in (("[]", "is no index"), ('{"weight_map": {"a": "b"}}', "names b, which")):
        (path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(UsageError, match=said):
            research_dp.load_hf(path)


@pytest.mark.parametrize("kind", ["same", "other"])
def test_a_tied_head_that_is_in_the_file_is_the_embedding(kind, tmp_path):
    path = folder_of("llama_tied", tmp_path)
    table = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    broken(path, add={"lm_head.weight": table if kind == "same" else table + 1})
    if kind == "same":
        research_dp.load_hf(path)
    else:
        with pytest.raises(UsageError, match="no row takes lm_head"):
            research_dp.load_hf(path)


def test_a_decoder_of_no_family_says_what_is_different():
    form = transformer(vocab_size=8, width=8, heads=2, tied=True).config["transformer"]
    with pytest.raises(UsageError, match=r"the nearest, llama, has scale_embedding False in place"):
        published.family_of(form)


def test_more_tokens_than_learned_positions_are_refused(tmp_path):
    model, params = research_dp.load_hf(folder_of("gpt2", tmp_path))
    with pytest.raises(UsageError, match=r"transformer.max_positions = 32, .* has 48 tokens"):
        model.apply(params, np.tile(models.tokens(), (1, 2)))
