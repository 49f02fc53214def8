"""Text of files: documents, packed rows, splits, and a run on them."""

import gzip
import json

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pyarrow import ipc

import research_dp
from research_dp.data.text import documents, packed, text_data
from research_dp.errors import UsageError
from research_dp.models.transformer import transformer
from research_dp.types import EvalOrder

TEXTS = ["Is this one?", "zwei", "", "trois\nlines\u00e9", "4" * 30] * 8


def written(folder, texts, kind):
    """A file of a kind with these texts."""
    folder.mkdir(exist_ok=True)
    path, table = folder / f"a.{kind}", pyarrow.table({"n": range(len(texts)), "text": texts})
    lines = "\n".join(json.dumps({"text": text, "n": 1}) for text in texts) + "\n\n"
    if kind == "jsonl":
        path.write_text(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        opened = {"arrow": ipc.new_stream, "file.arrow": ipc.new_file}[kind]
        with opened(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrow", "file.arrow"])
def test_documents_of_each_kind_of_file(kind, tmp_path):
    assert list(documents(written(tmp_path, TEXTS, kind), "text")) == TEXTS


def test_another_file_is_one_document(tmp_path):
    (tmp_path / "a.md").write_text("One\ntwo")
    assert list(documents(tmp_path / "a.md", "text")) == ["One\ntwo"]


def test_rows_are_filled_by_documents_one_after_the_other():
    rows = list(packed([[1, 2, 3], [], [4, 5, 6, 7, 8, 9], [10]], 4))
    assert [list(row["tokens"]) for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert [list(row["segments"]) for row in rows] == [[1, 1, 1, 2], [1, 1, 1, 1], [1, 2, 0, 0]]
    assert not list(packed([[]], 4))
    exact = list(packed([[1, 2], [3, 4]], 4))
    assert len(exact) == 1 and list(exact[0]["segments"]) == [1, 1, 2, 2]


def rows_of(data):
    """Rows of both splits, the first of which is read as a run reads it."""
    data.prepare()
    size = data.identity().splits["test"].examples
    batches = list(data.evaluate(EvalOrder(batch_size=size, rows=np.arange(size))))
    return data.identity(), np.concatenate([b["tokens"] for b in batches]), batches


def test_splits_are_of_documents_and_together_all_of_them(tmp_path):
    path = written(tmp_path / "in", [f"{i}!" * 5 for i in range(400)], "jsonl")
    options = {"files": str(path), "length": 32, "data_dir": str(tmp_path / "out")}
    data = text_data(**options, held_out=0.25)
    identity, tokens, _ = rows_of(data)
    counts = {split: x.examples for split, x in identity.splits.items()}
    texts = bytes(tokens.astype(np.uint8).reshape(-1)).rstrip(b"\0").decode()
    held_out = set(filter(None, texts.split("!")))
    assert 60 < len(held_out) < 140
    assert all(texts.count(f"{number}!") >= 5 for number in held_out)
    total = sum(len(f"{i}!" * 5) for i in range(400))
    assert sum(counts.values()) == -(-len(texts) // 32) + -(-(total - len(texts)) // 32)
    again = text_data(**options, held_out=0.25)
    assert again.identity() == identity and again.order == data.order
    path.write_text(path.read_text() + '{"text": "more"}\n')
    assert text_data(**options, held_out=0.25).order != data.order
    assert text_data(**options, held_out=0.5).order != data.order


def test_packed_documents_have_the_loss_of_each_by_itself():
    texts = [[5, 6, 7, 8], [9, 3, 4], [1, 2, 3, 4, 5, 6]]
    rows = list(packed(texts, 8))
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    model = transformer(vocab_size=16, width=16, depth=2, heads=2, mlp_width=16)
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in batch.items()}
    params, _ = model.init(jax.random.key(0), shapes)
    found = model.loss(params, {}, batch, None, train=True)
    parts = [[5, 6, 7, 8], [9, 3, 4], [1], [2, 3, 4, 5, 6]]  # as rows cut them
    alone = [
        model.loss(params, {}, {"tokens": np.int32([part])}, None, train=True)
        for part in parts
        if len(part) > 1
    ]
    np.testing.assert_allclose(found.total, sum(x.total for x in alone), rtol=1e-5)
    assert found.weight == sum(x.weight for x in alone) == 3 + 2 + 4


def tokenizer(folder):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[end]": 0, "?": 1, **{f"w{i}": i for i in range(2, 40)}}
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_tokens_are_those_of_a_tokenizer_with_an_end(tmp_path):
    path = written(tmp_path / "in", [f"w{i} w3" for i in range(4, 24)], "jsonl")
    given = {"files": [str(path)], "length": 6, "data_dir": str(tmp_path / "out")}
    given |= {"tokenizer": str(tokenizer(tmp_path)), "end": "[end]", "held_out": 0.5}
    data = text_data(**given)
    _, tokens, batches = rows_of(data)
    assert "vocab_size" not in data.info
    first = tokens[0]
    assert list(first[1:3]) == [3, 0] and list(first[4:6]) == [3, 0]
    assert list(batches[0]["segments"][0]) == [1, 1, 1, 2, 2, 2]
    with pytest.raises(UsageError, match=r"text_data.end = 'no' is no token of"):
        text_data(**{**given, "end": "no"})
    with pytest.raises(UsageError, match=r"text_data.tokenizer = .*none cannot be read"):
        text_data(**{**given, "tokenizer": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"txt": "a"}', r"document 0 has txt, and no text 'text'. Bind text_data.key"),
        ("[1]", "document 0 is no object"),
        ("{", r"a.jsonl cannot be read"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content, said, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    data = text_data(files=str(path), data_dir=str(tmp_path / "out"))
    with pytest.raises(UsageError, match=said):
        data.prepare()


def test_a_pattern_that_matches_nothing_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"text_data.files = .* matches no file"):
        text_data(files=str(tmp_path / "*.jsonl"))


def test_a_run_trains_on_own_text(tmp_path):
    path = written(tmp_path / "in", ["def f(x):\n    return x\n"] * 30 + TEXTS, "jsonl")
    bound = {
        "text_data.files": str(path),
        "text_data.length": 32,
        "text_data.held_out": 0.3,
        "text_data.data_dir": str(tmp_path / "data"),
        **{"transformer.width": 16, "transformer.depth": 1, "train.batch_size": 8},
        **{"NUM_STEPS": 4, "train.log_every": 2},
    }
    files = ["runs/lm_stdlib.gin", "data/text.gin", "strategies/ddp.gin"]
    found = research_dp.run(files, bound, workdir=tmp_path / "run")
    assert found["step"] == 4 and found["data"]["name"].startswith("packed_text/")


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.txt.gz", "jsonl"])
def test_one_file_of_text_is_refused_before_it_is_read(name, tmp_path):
    (tmp_path / name).write_text("One\ntwo")
    with pytest.raises(UsageError, match=rf"text_data.files = .*{name}' is one document.* .jsonl"):
        text_data(files=str(tmp_path / name))


@pytest.mark.parametrize(
    ("texts", "held_out", "split"),
    [(["a"], 0.01, "test"), (["a"], 0.99, "train"), (["a", "", ""], 0.01, "test"), ([], 0.5, ".*")],
)
def test_a_split_without_a_text_is_named(texts, held_out, split, tmp_path):
    path = written(tmp_path / "in", texts, "jsonl")
    data = text_data(files=str(path), held_out=held_out, data_dir=str(tmp_path / "out"))
    with pytest.raises(UsageError, match=f"held_out = {held_out} leaves split '{split}' without"):
        data.prepare()


def test_both_splits_need_a_share_of_many_documents(tmp_path):
    path = written(tmp_path / "in", TEXTS, "jsonl")
    for held_out, split in {0.0: "test", 1.0: "train"}.items():
        with pytest.raises(UsageError, match=f"leaves split '{split}' without a document"):
            text_data(files=str(path), held_out=held_out)
