"""Arrays and sources by index as data: order, resume and processes are right by construction."""

import collections
import dataclasses
import io
import itertools
import tarfile
import threading
import time
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import research_dp
from examples.own_data.shards import Shards
from research_dp import EvalOrder, TrainOrder, UsageError, from_arrays, from_source
from research_dp.data.preprocess import stack
from tests.support.programs import output
from tests.support.recipes import recipe

SIZE, BATCH = 50, 8
ROWS = np.arange(BATCH)


def arrays(size=SIZE):
    return np.arange(size * 3.0).reshape(size, 3), np.arange(size) % 4


class Source:
    """The least that a source has, with examples as PyTorch's data sets have them."""

    def __init__(self, size=SIZE):
        self.x, self.y = arrays(size)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Rows(Source):
    """As Hugging Face's data sets are: several at once, and examples as dicts."""

    def __getitem__(self, index):
        return {"x": self.x[index].tolist(), "y": int(self.y[index])}

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def pair(example):
    return {"x": example[0], "y": example[1]}


MADE = {
    "arrays": lambda: from_arrays(*arrays()),
    "jax arrays": lambda: from_arrays(*map(jnp.asarray, arrays())),
    "a dict": lambda: from_arrays(dict(zip("xy", arrays(), strict=True))),
    "a source": lambda: from_source(Source(), transform=pair, name="arrays"),
    "a source without a cache": lambda: from_source(
        Source(), transform=pair, name="arrays", cache_bytes=0
    ),
    "threads": lambda: from_source(Rows(), threads=2, name="arrays"),
    "a list": lambda: from_source([Rows()[i] for i in range(SIZE)], name="arrays"),
}


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def order_of(first=0, last=20, rows=ROWS, seed=1):
    return TrainOrder(seed=seed, batch_size=BATCH, rows=rows, first_step=first, num_steps=last)


def train(data, *order, **options):
    return list(data.train(order_of(*order, **options)))


def evaluate(data):
    return list(data.evaluate(EvalOrder(batch_size=BATCH, rows=ROWS)))


def numbers(batches):
    """Which examples there are, by the first feature."""
    return [int(x) // 3 for batch in batches for x in batch["x"][:, 0]]


@pytest.mark.parametrize("kind", MADE)
def test_all_kinds_give_the_same_batches(kind):
    data, expected = MADE[kind](), MADE["arrays"]()
    assert_same(train(data), train(expected))
    assert_same(evaluate(data), evaluate(expected))
    assert data.example == expected.example and data.order == expected.order
    assert data.identity() == expected.identity()


@pytest.mark.parametrize("dtype", ["f8", ">f8", ">f4", np.longdouble])
def test_examples_are_those_of_the_arrays_narrowed_as_jax_computes(dtype):
    x, y = arrays()
    data = from_arrays(x.astype(dtype), y.astype(">i8" if dtype == ">f8" else y.dtype))
    assert {name: (s.shape, s.dtype) for name, s in data.example.items()} == {
        "x": ((3,), np.float32),
        "y": ((), np.int32),
    }
    for batch in [*train(data), *evaluate(data)]:
        assert batch["x"].dtype == np.float32 and batch["y"].dtype == np.int32
        for row, label in zip(batch["x"], batch["y"], strict=True):
            index = int(row[0]) // 3
            np.testing.assert_array_equal(row, x[index])
            assert label == y[index]


def test_each_epoch_has_each_training_example_once_and_no_other():
    data = from_arrays(*arrays(), eval=10 / SIZE)
    held_out = [n for n, real in masked(evaluate(data)) if real]
    epochs = np.reshape(numbers(train(data, last=40))[: 2 * 40 * 4], (-1, 40))
    assert len(set(held_out)) == 10
    for epoch in epochs:
        assert sorted([*epoch, *held_out]) == list(range(SIZE))
    assert (epochs[0] != epochs[1]).any() and held_out == sorted(held_out)
    again = from_arrays(*arrays(), eval=10 / SIZE)
    assert numbers(evaluate(again)) == numbers(evaluate(data)), "another split in another run"
    assert numbers(train(data, seed=2)) != numbers(train(data, seed=1))


def masked(batches):
    flags = [bool(m) for batch in batches for m in batch["mask"]]
    return zip(numbers(batches), flags, strict=True)


@pytest.mark.parametrize("kind", ["arrays", "a source"])
def test_resumed_in_other_processes_the_stream_goes_on(kind):
    data = MADE[kind]()
    undisturbed = numbers(train(data))
    stream = []
    for first, last, processes in ((0, 7, 1), (7, 13, 4), (13, 20, 2)):
        rows = [ROWS[i::processes] for i in range(processes)]
        parts = [train(data, first, last, part) for part in rows]
        for step in zip(*parts, strict=True):
            batch = dict(zip(np.concatenate(rows), numbers(step), strict=True))
            stream += [batch[row] for row in range(BATCH)]
    assert stream == undisturbed


def test_augmentation_is_a_function_of_seed_and_place_for_training_alone():
    def noisy(example, rng):
        return {**example, "x": example["x"] + rng.random(3) / 2}

    data = from_arrays(*arrays(), augment=noisy)
    plain = from_arrays(*arrays())
    rows = np.array([5, 2])
    for found, all_rows, other in zip(
        train(data, 3, 9, rows), train(data, 3, 9), train(plain, 3, 9, rows), strict=True
    ):
        np.testing.assert_array_equal(found["x"], all_rows["x"][rows])
        assert (found["x"] != other["x"]).all() and found["x"].dtype == np.float32
        np.testing.assert_allclose(found["x"], other["x"], atol=0.5)
    assert_same(evaluate(data), evaluate(plain))
    source = from_source(Source(), transform=pair, augment=noisy, name="arrays")
    assert_same(train(source, 3, 9), train(data, 3, 9))


def test_evaluation_data_of_its_own_leaves_all_for_training():
    x, y = arrays()
    same = from_arrays(x, y, eval=(x, y)).identity().splits
    assert same["train"] == same["eval"] and same["train"].examples == SIZE
    for data in (
        from_arrays(x, y, eval=(x[:5], y[:5])),
        from_arrays(x, y, eval=[x[:5], y[:5]]),
        from_source(Rows(), eval=Rows(5)),
        from_arrays({"x": x, "y": y}, eval={"x": x[:5], "y": y[:5]}),
    ):
        assert set(numbers(train(data, last=14))) == set(range(SIZE))
        assert [n for n, real in masked(evaluate(data)) if real] == list(range(5))


@pytest.mark.parametrize("fraction", [np.float32(0.1), np.float64(0.1)])
def test_a_fraction_of_numpy_is_a_fraction(fraction):
    for data in (from_arrays(*arrays(), eval=fraction), from_source(Rows(), eval=fraction)):
        assert data.identity().splits["eval"].examples == SIZE // 10


def test_augmentation_leaves_evaluation_in_the_cache():
    class Counting(Rows):
        reads = 0

        def __getitem__(self, index):
            Counting.reads += 1
            return super().__getitem__(index)

    data = from_source(
        Counting(), eval=Counting(10), augment=lambda example, rng: {**example, "x": -example["x"]}
    )
    evaluate(data)
    before = Counting.reads
    assert (evaluate(data)[0]["x"] >= 0).all() and Counting.reads == before


def test_identity_tells_other_data_from_the_same():
    x, y = arrays()
    one = from_arrays(x, y).identity()
    assert (one.splits["train"].examples, one.splits["eval"].examples) == (45, 5)
    assert one.difference(from_arrays(x + 1, y).identity())[0] == "the digest of examples of train"
    later = np.where(np.arange(SIZE)[:, None] < SIZE // 2, x, x + 1)
    assert one.difference(from_arrays(later, y).identity())[0] == "the digest of examples of train"
    fewer = from_arrays(x[:-1], y[:-1]).identity()
    assert one.difference(fewer)[0] == "the number of examples in train"
    assert one.difference(from_arrays(x, y, name="other").identity())[0] == "the data set"


def test_an_example_is_located_by_its_index_in_the_users_data():
    x, y = arrays()
    data = from_arrays(x, y)
    first = numbers(train(data, last=1))[0]
    assert data.locate(order_of(last=1), 0) == f"example {first} of arrays train"


class Broken(Source):
    def __getitem__(self, index):
        if index == 7:
            raise OSError("disk gone")
        return super().__getitem__(index)


class Uneven(Rows):
    def __getitem__(self, index):
        return {"x": np.zeros(3 + (index == 9)), "y": 0}


class Stream:
    def __iter__(self):
        yield from ()


def broken(example):
    if example[1] == 3 and example[0][0] == 21:
        raise KeyError("label")
    return pair(example)


def read_all(data):
    train(data, last=14)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x, y: from_arrays(x, y[:-1]),
            r"arrays of arrays differ in length: x \(50, 3\), y \(49,\). The first dim counts",
        ),
        (lambda x, y: from_arrays(x, 3), r"differ in length: x \(50, 3\), y \(\)"),
        (lambda x, y: from_arrays(x[:0], y[:0]), "arrays has no examples"),
        (
            lambda x, y: from_arrays(x, y.astype(object)),
            "'y' is of dtype object. Give numbers of one shape: encode text",
        ),
        (lambda x, y: from_arrays(x, y.astype(str)), "'y' is of dtype <U"),
        (
            lambda x, y: from_arrays(x, y.astype(float), info={"num_classes": 4}),
            r"has num_classes = 4 and 'y' of dtype float32. Labels are integers: y.astype",
        ),
        (
            lambda x, y: from_arrays(x, y + 1, info={"num_classes": 4}),
            "has num_classes = 4 and 'y' from 1 to 4. Number them from 0 to 3",
        ),
        (
            lambda x, y: from_arrays(x, y, eval=(x, y + 1), info={"num_classes": 4}),
            "arrays eval has num_classes = 4 and 'y' from 1 to 4",
        ),
        (lambda x, y: from_arrays(x, y * 2**40), "'y' has values beyond int32. Number them"),
        (lambda x, y: from_arrays(x * 1e300, y), "'x' has values beyond float32. Scale them"),
        (
            lambda x, y: read_all(from_source([{"x": 1.0}] * 20 + [{"x": 1e300}] * 20)),
            r"example \d+ of source train: 'x' has values beyond float32",
        ),
        (lambda x, y: from_arrays(x, y, eval=0.001), "eval = 0.001: 0 of 50 examples"),
        (lambda x, y: from_arrays(x, y, eval=1.5), "Give a fraction between 0 and 1"),
        (
            lambda x, y: from_arrays(x, y, eval=(x[:, :2], y)),
            r"eval has examples of x \(2,\) float32, y \(\) int32, and the training data of arrays",
        ),
        (lambda x, y: from_arrays({"x": x}, y), "has a dict and y"),
        (lambda x, y: from_arrays(x, y, eval=None), r"eval = None: 0 of .*, to train on all of it"),
        (
            lambda x, y: from_source([{"x": x[0]}], eval=0),
            r"eval = 0: 0 of .*, to train on all of it",
        ),
        (
            lambda x, y: from_arrays({"x": x, "mask": y}),
            "from_arrays: an array is called 'mask', which marks padding in evaluation. Name it",
        ),
        (
            lambda x, y: from_source([{"x": 1.0, "mask": 1.0}] * 20),
            "example 0 of source train: an array is called 'mask'",
        ),
        (
            lambda x, y: read_all(from_source(Source(), transform=broken)),
            "example 7 of source train: from_source.transform failed with KeyError: 'label'",
        ),
        (
            lambda x, y: read_all(from_arrays(x, y, augment=lambda example, rng: example / 2)),
            r"example \d+ of arrays train: from_arrays.augment failed with TypeError: unsupported",
        ),
        (lambda x, y: from_source({"x": x}), "is a dict. Use research_dp.from_arrays"),
        (
            lambda x, y: from_source(Stream()),
            r"is a Stream, without len\(\) or access by index. Read a stream once into a list",
        ),
        (lambda x, y: from_source([]), "source has no examples"),
        (
            lambda x, y: from_source(Source()),
            "example 0 of source train: it is a tuple. Give dicts of arrays, by",
        ),
        (
            lambda x, y: read_all(from_source(Broken(), transform=pair)),
            "example 7 of source train cannot be read: OSError: disk gone",
        ),
        (
            lambda x, y: read_all(from_source(Uneven())),
            r"example 9 of source train: it has x \(4,\) float32, y \(\) int32, and the first",
        ),
    ],
)
def test_what_is_wrong_with_data_is_named(make, message):
    with pytest.raises(UsageError, match=message):
        make(*arrays())


def test_shards_of_webdataset_are_read_by_index(tmp_path):
    paths = [tmp_path / f"{shard}.tar" for shard in range(2)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for index in range(3):
                x = io.BytesIO()
                np.save(x, np.full(2, 3 * shard + index))
                parts = {"x.npy": x.getvalue(), "y.cls": str(index).encode()}
                for extension, content in parts.items():
                    info = tarfile.TarInfo(f"part.a/{index:04d}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    shards = Shards(paths)
    assert len(shards) == 6 and shards[4]["__key__"] == "part.a/0001"
    read = [
        (np.load(io.BytesIO(s["x.npy"]))[0], int(s["y.cls"]))
        for s in map(shards.__getitem__, range(6))
    ]
    assert read == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2)]


# ---- What is given is not changed, nor changes ----


def noisy(example, rng):
    """Changes its example in place, as many do."""
    example["x"] += rng.normal(size=3).astype(np.float32)
    return example


class Buffered(Source):
    """Writes each example into the same memory."""

    def __init__(self):
        super().__init__()
        self.buffer = {"x": np.empty(3, np.float32), "y": np.empty((), np.int32)}

    def __getitem__(self, index):
        self.buffer["x"][:], self.buffer["y"][...] = self.x[index], self.y[index]
        time.sleep(0.001)  # lets another thread in
        return self.buffer


class Objects(Buffered):
    """Gives an object that has the memory."""

    def __getitem__(self, index):
        return types.SimpleNamespace(**super().__getitem__(index))


class InTurns(Buffered):
    """Writes into two buffers in turns."""

    def __getitem__(self, index):
        last, fresh = self.buffer, {name: x.copy() for name, x in self.buffer.items()}
        self.buffer, self.last = getattr(self, "last", fresh), last
        return super().__getitem__(index)


class Collected(Buffered):
    """As torch's `Subset`: several at once are a list of what one gives."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class CollectedInTurns(InTurns, Collected):
    """The first two of them have memory of their own."""


class CollectedObject(Collected):
    """Several at once are one object."""

    def __init__(self):
        super().__init__()
        self.one = types.SimpleNamespace()

    def __getitem__(self, index):
        vars(self.one).update(super().__getitem__(index))
        return self.one


def attributes(example):
    return {"x": example.x, "y": example.y}


class IntoOne:
    """A transform that returns the same memory again."""

    def __init__(self):
        self.buffer = {"x": np.empty(3, np.float32), "y": np.empty((), np.int32)}

    def __call__(self, example):
        self.buffer["x"][:], self.buffer["y"][...] = example
        time.sleep(0.001)
        return self.buffer


REUSED = {
    "one buffer": (Buffered, None),
    "objects": (Objects, attributes),
    "in turns": (InTurns, None),
    "collected": (Collected, None),
    "collected in turns": (CollectedInTurns, None),
    "one object": (CollectedObject, attributes),
    "transform": (Source, IntoOne()),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *itertools.product(REUSED, [{"cache_bytes": 0}, {"cache_bytes": 0, "threads": 3}, {}]),
        pytest.param("one buffer", {"cache_bytes": 0, "workers": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_memory_that_is_used_again_wherever_it_is(kind, options):
    source, transform = REUSED[kind]
    data = from_source(source(), transform=transform, name="arrays", **options)
    expected = from_arrays(*arrays())
    both = data.train(order_of()), expected.train(order_of())
    for _ in range(3):  # an evaluation in between reads the same source
        assert_same(next(both[0]), next(both[1]))
        assert_same(evaluate(data), evaluate(expected))
    assert_same(list(both[0]), list(both[1]))


def test_what_cannot_be_copied_keeps_no_array_from_being_copied():
    given = [{**example, "lock": threading.Lock()} for example in list_of_examples()]

    def doubled(example):
        example["x"] *= 2
        return {"x": example["x"], "y": example["y"]}

    train(from_source(given, transform=doubled, cache_bytes=0))
    for example, expected in zip(given, list_of_examples(), strict=True):
        np.testing.assert_array_equal(example["x"], expected["x"])


@pytest.mark.parametrize(
    "other", [{"x": np.ones(2)}, {"x": np.ones(3), "y": 1}, {"x": np.ones(3, int)}]
)
def test_examples_that_do_not_fit_are_not_stacked(other):
    with pytest.raises(UsageError, match=r"an example has .* and others have"):
        stack([{"x": np.ones(3)}, other], 2)


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Item:
    x: np.ndarray
    y: np.ndarray


class Named(dict):
    """Has its values as attributes too."""

    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("kind", [Pair, Item, Named, collections.OrderedDict])
def test_examples_of_other_kinds_are_copied_with_their_arrays(kind):
    given = [kind(**example) for example in list_of_examples()]

    def doubled(example):
        assert type(example) is kind
        x, y = example.values() if isinstance(example, dict) else attributes(example).values()
        x *= 2
        return {"x": x, "y": y}

    (first, *_) = train(from_source(given, transform=doubled, cache_bytes=0, name="arrays"))
    (expected, *_) = train(from_arrays(*arrays()))
    np.testing.assert_array_equal(first["x"], 2 * expected["x"])
    for example, other in zip(given, list_of_examples(), strict=True):
        x = example["x"] if isinstance(example, dict) else example.x
        np.testing.assert_array_equal(x, other["x"])


def halved(example):
    example["x"] *= 0.5
    return example


def list_of_examples():
    return [
        {"x": x.astype(np.float32), "y": y.astype(np.int32)} for x, y in zip(*arrays(), strict=True)
    ]


@pytest.mark.parametrize("kind", ["arrays", "a dict", "a list", "transform", "eval"])
def test_functions_that_change_their_example_leave_the_data_alone(kind):
    x, y = (arrays()[0].astype(np.float32), arrays()[1].astype(np.int32))
    given = list_of_examples()
    data = {
        "arrays": lambda: from_arrays(x, y, augment=noisy),
        "a dict": lambda: from_arrays({"x": x, "y": y}, augment=noisy),
        "a list": lambda: from_source(given, augment=noisy, cache_bytes=0),
        "transform": lambda: from_source(given, transform=halved, cache_bytes=0),
        "eval": lambda: from_source(given, eval=given, augment=noisy),
    }[kind]()
    evaluated = evaluate(data)
    first, later = train(data, last=12), train(data, first=6, last=12)
    assert_same(first[6:], later)  # as a resumed run reads it
    assert_same(evaluate(data), evaluated)
    assert_same(train(data, last=12), first)
    assert_same(given, list_of_examples())
    np.testing.assert_array_equal(x, arrays()[0])


@pytest.mark.parametrize("stem", ["single", "ddp"])
def test_a_placed_batch_does_not_change_with_the_callers_array(stem):
    """On CPUs JAX takes the memory itself, and a loop may refill its buffer."""
    raw = np.zeros(8 * 1024 + 64, np.uint8)
    start = -raw.ctypes.data % 64  # JAX shares memory that is aligned so
    x = raw[start : start + 8 * 1024].view(np.float32).reshape(16, 128)
    spec = research_dp.TrainSpec(
        model=research_dp.from_linen(nn.Dense(1), loss=lambda y, _: y[:, 0], targets=None),
        optimizer=optax.sgd(0.1),
        example={"x": jax.ShapeDtypeStruct((128,), np.float32)},
        batch_size=16,
    )
    strategy = recipe(stem).build(spec)
    placed = [strategy.place_batch({"x": x}).examples, strategy.place_eval_batch({"x": x})]
    x[:] = 1
    assert all(not np.asarray(batch["x"]).any() for batch in placed)
    with pytest.raises(UsageError, match="place_batch: 'x' is a masked array"):
        strategy.place_batch({"x": np.ma.masked_array(x, x > 0)})


MASKED = np.ma.masked_array(np.ones((SIZE, 3)), np.eye(SIZE, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_arrays(MASKED),
        lambda: from_arrays({"x": np.ones((SIZE, 3)), "w": MASKED[:, 0]}),
        lambda: from_arrays(np.ones((SIZE, 3)), eval=(MASKED, None)),
        lambda: from_arrays(list(MASKED)),
        lambda: from_arrays([np.ones(3), *MASKED]),
        lambda: from_arrays([[np.ones(3), row] for row in MASKED]),
        lambda: from_source([{"x": row} for row in MASKED]),
    ],
)
def test_masked_arrays_are_refused(make):
    with pytest.raises(UsageError, match=r"'[xw]' is a masked array, .* Fill it"):
        make()


READS_ALONE = """
import sys
import jax.numpy as jnp
import numpy as np
import research_dp

data = research_dp.from_arrays(jnp.ones((8, 2)), np.zeros(8, np.int32))
order = research_dp.TrainOrder(seed=0, batch_size=4, rows=np.arange(4), first_step=3, num_steps=5)
print(len(list(data.train(order))), sorted({"grain", "orbax"} & sys.modules.keys()))
research_dp.from_linen, research_dp.from_nnx
print(sorted({"tensorflow", "tensorflow_datasets"} & sys.modules.keys()))
"""


def test_reading_without_threads_imports_neither_grain_nor_orbax_nor_tensorflow():
    assert output(READS_ALONE) == "2 []\n[]\n"
