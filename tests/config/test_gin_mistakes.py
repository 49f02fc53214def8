"""Planted mistakes: each is refused before anything is compiled, with its place and what is right.

And what must not be refused: the shipped files, in any sensible combination.
"""

import functools
import time

import gin
import jax
import pytest

from research_dp import train
from research_dp.config import load as gin_config
from tests.support.repository import ROOT, stems
from tests.support.runs import DIGITS

load = functools.partial(gin_config.load, complete=True)


@pytest.fixture
def refused(capsys, tmp_path):
    """Runs the command on a file of this text after digits.gin; returns what it tells."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )

    def run(text="", flags=(), first=(DIGITS,)):
        file = tmp_path / "mine.gin"
        file.write_text(text)
        compiled.clear()
        started = time.monotonic()
        status = train.main([*first, f"--gin_file={file}", *flags, f"--workdir={tmp_path / 'w'}"])
        seconds = time.monotonic() - started
        told = capsys.readouterr().err
        assert status == 2, told
        assert seconds < 5
        assert not compiled
        assert not (tmp_path / "w").exists()
        assert all(line.startswith("error: ") for line in told.splitlines()), told
        return told.replace(str(file), "mine.gin")

    yield run
    jax.monitoring.clear_event_listeners()


# Text of a file -> the place, and parts of what is told of it.
IN_A_FILE = {
    # ---- Names ----
    "train.num_stpes = 3": ("mine.gin:1", "no parameter 'num_stpes'", "Did you mean num_steps?"),
    "trian.num_steps = 3": ("mine.gin:1", "there is no 'trian'", "Did you mean train?"),
    "train.model = @convnett()": ("mine.gin:1", "@convnett()", "Did you mean convnet?"),
    "train.optimizer = @adamm()": ("mine.gin:1", "'adamm'", "optax.adam"),
    "largest_dmi:\n  min_weight_size = 3": ("mine.gin:2", "Did you mean largest_dim?"),
    "train.workdir = '/tmp'": ("mine.gin:1", "from the command, not from gin"),
    "data_parallel.engine = @make_mesh": ("mine.gin:1", "it returns Mesh", "give a function"),
    "data_parallel.shard = @mapped": ("mine.gin:1", "it returns Strategy"),
    # ---- Macros ----
    "NUM_STPES = 10": ("mine.gin:1", "nothing uses %NUM_STPES"),
    "train.num_steps = %STEPS": ("mine.gin:1", "%STEPS is used and bound nowhere", "--gin.STEPS"),
    "STEPS = 3\ntrain.num_steps = %STPES": ("mine.gin:2", "%STPES is used", "Did you mean STEPS?"),
    "A = %B\nB = %A\ntrain.num_steps = %A": ("mine.gin:3", "%A = %B = %A has no end"),
    "W = 'x'\nconvnet.features = [%W, 3]": ("mine.gin:2", "integers"),
    "gin.macro.value = 3": ("mine.gin:1", "gin's own"),
    "STEPS = 1e3\ntrain.num_steps = %STEPS": ("mine.gin:2", "1000.0", "%STEPS is bound in mine.g"),
    # ---- Twice ----
    "train.seed = 1\ntrain.seed = 2": ("mine.gin:2", "mine.gin:1 in the same file says 1"),
    "optax.adamw.b1 = 0.8\nadamw.b1 = 0.7": ("mine.gin:2", "mine.gin:1 in the same file says 0.8"),
    # ---- Types ----
    "train.num_steps = 'abc'": ("mine.gin:1", "'abc': give an integer from 0 to 2^31 - 1"),
    "train.num_steps = 2147483653": ("mine.gin:1", "2147483653: give an integer from 0"),
    f"train.max_grad_norm = {10**400}": ("mine.gin:1", "0: give a positive number"),
    "train.num_steps = 1e3": ("mine.gin:1", "1000.0: give an integer"),
    "train.batch_size = True": ("mine.gin:1", "True: give an integer of at least 1"),
    "train.batch_size = None": ("mine.gin:1", "None: give an integer"),
    "train.seed = -1": ("mine.gin:1", "-1: give an integer from 0 to 2^32 - 1"),
    "train.seed = 4294967296": ("mine.gin:1", "give an integer from 0 to 2^32 - 1"),
    "optax.adamw.mu_dtype = 'flot32'": ("mine.gin:1", "give a dtype, e.g. 'bfloat16', or None"),
    "optax.adamw.mu_dtype = 3": ("mine.gin:1", "give a dtype"),
    "train.log_every = 0": ("mine.gin:1", "0: give an integer of at least 1"),
    "train.max_grad_norm = 0.0": ("mine.gin:1", "give a positive number, or None"),
    "convnet.dropout_rate = 1.0": ("mine.gin:1", "give a fraction in [0, 1)"),
    "convnet.dropout_rate = '0.5'": ("mine.gin:1", "give a fraction in [0, 1)"),
    "convnet.features = 8": ("mine.gin:1", "8: give a tuple or list of integers"),
    "convnet.features = (8, 0)": ("mine.gin:1", "(8, 0): give a tuple or list of integers"),
    "image_classification.flip = 'no'": ("mine.gin:1", "'no': give True or False"),
    "tfds_data.name = 3": ("mine.gin:1", "3: give a string"),
    "make_mesh.axes = [1, 8]": ("mine.gin:1", "[1, 8]: give a dict"),
    "optax.adamw.learning_rate = '1e-3'": ("mine.gin:1", "optax.adamw.learning_rate = '1e-3'"),
    # ---- Choices ----
    "convnet.norm = 'layer'": ("mine.gin:1", "use one of ['batch', 'group', 'none']"),
    "convnet.norm = 'grop'": ("mine.gin:1", "Did you mean 'group'?"),
    "convnet.api = 'nxx'": ("mine.gin:1", "['linen', 'nnx']", "Did you mean 'nnx'?"),
    "tfds_data.file_format = 'tfrecords'": ("mine.gin:1", "Did you mean 'tfrecord'?"),
    "data_parallel.sync_each = 'epoch'": ("mine.gin:1", "one of ['step', 'micro_batch']"),
    "convnet.dtype = 'bfloat17'": ("mine.gin:1", "give a floating-point dtype, e.g. 'bfloat16'"),
    "gather_params.gather_dtype = 'int32'": ("mine.gin:1", "give a floating-point dtype"),
    # ---- References ----
    "train.model = @convnet": ("mine.gin:1", "@convnet is the function itself; @convnet()"),
    "train.model = @tfds_data()": ("mine.gin:1", "it returns DataSet; give e.g. @convnet()"),
    "train.strategy = 'ddp'": ("mine.gin:1", "'ddp': give e.g. @data_parallel()"),
    "data_parallel.engine = 'maped'": ("mine.gin:1", "give a function, e.g. @mapped"),
    "data_parallel.engine = 'data_parallel'": ("mine.gin:1", "give a function, e.g. @mapped"),
    "train.strategy = 'mlp'": ("mine.gin:1", "give e.g. @data_parallel()."),
    "train.optimizer = 'optax.adamw'": ("mine.gin:1", "give e.g. @optax.adamw()."),
    "train.optimizer = 'optax.adamw()'": ("mine.gin:1", "give e.g. @optax.adamw()."),
    "train.optimizer = 'warmup_cosine'": ("mine.gin:1", "give e.g. @sign_descent()."),
    "data_parallel.mesh = @make_mesh": ("mine.gin:1", "@make_mesh() is what it returns"),
    "data_parallel.engine = @mapped()": ("mine.gin:1", "give the function, @mapped"),
    # ---- Without effect ----
    "mlp.widths = (32,)": ("mine.gin:1", "never calls mlp", "train.model is @convnet() (mod"),
    "optax.adam.b1 = 0.8": ("mine.gin:1", "never calls optax.adam", "mean optax.adamw.b1?"),
    "tf_data.prefetch = 2": ("mine.gin:1", "never calls tf_data", "random_access"),
    "one/convnet.hidden = 8": ("mine.gin:1", "nothing is called in scope 'one'"),
    "include 'gin/strategies/ddp.gin'\ngather_params.gather_dtype = 'bfloat16'": (
        "mine.gin:2",
        "never calls gather_params",
    ),
    # ---- Syntax, files, imports ----
    "train.seed = a/b": ("mine.gin:1", "put quotes around a string"),
    "train.optimizer = optax.adamw": ("mine.gin:1", "(did you mean @optax.adamw()?)"),
    "train.data = digits()  # mine": ("mine.gin:1", "% before a macro, @ before a function"),
    "train.model = mlp()  # mine": ("mine.gin:1", "(did you mean @mlp()?)"),
    "data_parallel.engine = mapped": ("mine.gin:1", "(did you mean @mapped?)"),
    "optax.adamw.mask = matrices_only": ("mine.gin:1", "(did you mean @matrices_only?)"),
    "train.num_steps =": ("mine.gin:1", "put quotes around a string"),
    "\ntrain.seed == 2": ("mine.gin:2", "train.seed == 2"),
    "make_mesh.axes = {'data': 8": ("mine.gin:1", "make_mesh.axes"),
    "include 'gin/models/mpl.gin'": ("mine.gin:1", "Did you mean models/mlp.gin?"),
    "include 'mine.gin'": ("mine.gin:1", "includes itself"),
    "import no_such_package": ("mine.gin:1", "No module named 'no_such_package'"),
    "include 'gin/runs/lm_stdlib.gin'": ("mine.gin", "complete run, and so is gin/runs/digits.gin"),
    # ---- Missing ----
    "train.optimizer = @optax.lamb()": ("optax.lamb needs 'learning_rate'", "Bind optax.lamb.lear"),
}


@pytest.mark.parametrize("text", IN_A_FILE)
def test_a_mistake_in_a_file_is_refused(refused, text):
    told = refused(text)
    for part in IN_A_FILE[text]:
        assert part in told
    assert len(told.splitlines()) == 1


ON_THE_COMMAND_LINE = {
    "--gin.train.num_steps=1e3": ("--gin.train.num_steps", "1000.0: give an integer"),
    "--gin.NUM_STPES=10": ("nothing uses %NUM_STPES",),
    "--gin_bindings=mlp.widths = (32,)": ("--gin.mlp.widths", "never calls mlp"),
    "--gin.convnet.norm=layer": ("--gin.convnet.norm", "'layer': use one of"),
    "--gin_file=gin/strategies/fsdpp.gin": ("no such file", "Did you mean strategies/fsdp.gin?"),
    "--import=no_such_package": ("--import=no_such_package", "No module named"),
    "--gin.make_mesh.axes=((": ("--gin.make_mesh.axes", "make_mesh.axes"),
    # ---- Other systems' names ----
    "--gin_file=zero3": ("no such file. Did you mean strategies/fsdp.gin?",),
    "--gin_file=zero-3.gin": ("Did you mean strategies/fsdp.gin?",),
    "--gin_file=FULL_SHARD": ("Did you mean strategies/fsdp.gin?",),
    "--gin_file=hybrid_shard": ("Did you mean strategies/hsdp.gin?",),
    "--gin_file=gspmd": ("Did you mean strategies/spmd.gin?",),
    "--gin_file=strategies/zero_2": ("Did you mean strategies/zero2.gin?",),
    "--gin_file=fdsp": ("Did you mean strategies/fsdp.gin?",),
    "--gin_file=nothing_like_it": ("no such file.\n",),
    # ---- What sets it in this run ----
    "--gin.train.learning_rate=0.1": ("no parameter", "is warmup_cosine.peak_value (optax.adamw."),
    "--gin.learning_rate=0.1": ("nothing uses", "In this run it is warmup_cosine.peak_value"),
    "--gin.optax.adamw.lr=0.1": ("no parameter 'lr'", "is warmup_cosine.peak_value"),
    "--gin.train.weight_decay=0.1": ("In this run it is optax.adamw.weight_decay.",),
    "--gin.train.dropout=0.1": ("In this run it is convnet.dropout_rate.",),
}


@pytest.mark.parametrize("flag", ON_THE_COMMAND_LINE)
def test_a_mistake_on_the_command_line_is_refused(refused, flag):
    told = refused(flags=[flag])
    for part in ON_THE_COMMAND_LINE[flag]:
        assert part in told
    assert len(told.splitlines()) == 1


def test_all_mistakes_are_told_at_once(refused):
    told = refused(
        "train.num_stpes = 3\ntrain.seed == 2\nconvnet.norm = 'layer'\nWIDTH = 3\n",
        ["--gin.train.batch_size=many"],
    )
    assert len(told.splitlines()) == 4  # WIDTH may belong to the line that cannot be read
    for place in ("mine.gin:1", "mine.gin:2", "mine.gin:3", "--gin.train.batch_size"):
        assert f"error: {place}: " in told


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["strategies/spmd", "precision/bf16_gather"], "nothing here has an effect"),
        (["precision/bf16_collectives", "strategies/single"], "nothing here has an effect"),
    ],
)
def test_options_without_effect_under_the_strategy_are_refused(refused, files, told):
    assert told in refused(flags=[f"--gin_file=gin/{file}.gin" for file in files])


# Files in a wrong order -> the file that loses, and the order that is told.
DIGITS_GIN = "gin/runs/digits.gin"
ORDERS = [
    (
        ["gin/strategies/zero1.gin", DIGITS_GIN],
        "gin/strategies/zero1.gin",
        "every binding of it, since the last file wins. Leave it out, or give "
        "--gin_file=gin/runs/digits.gin --gin_file=gin/strategies/zero1.gin in this order.",
    ),
    (
        ["gin/precision/f16.gin", DIGITS_GIN],
        "gin/precision/f16.gin",
        "gin/runs/digits.gin replaces COMPUTE_DTYPE = 'float16', since the last file wins. Give "
        "--gin_file=gin/runs/digits.gin --gin_file=gin/precision/f16.gin in this order.",
    ),
    (
        [DIGITS_GIN, "gin/precision/f16.gin", "gin/models/mlp.gin"],
        "gin/precision/f16.gin",
        "Give --gin_file=gin/models/mlp.gin --gin_file=gin/precision/f16.gin in this order.",
    ),
    (
        [DIGITS_GIN, "gin/options/h100.gin", "gin/options/h100_memory.gin"],
        "gin/options/h100.gin",
        "gin/options/h100_memory.gin replaces every binding of it",
    ),
    (
        [DIGITS_GIN, "gin/strategies/ddp.gin", "gin/strategies/zero2.gin"],
        "gin/strategies/ddp.gin",
        "gin/strategies/zero2.gin replaces every binding of it, since the last file wins. Leave it",
    ),
]


@pytest.mark.parametrize(("files", "loser", "told"), ORDERS)
def test_an_order_in_which_a_file_is_undone_is_refused(files, loser, told):
    with pytest.raises(gin_config.Mistakes) as refused:
        load(files)
    (message,) = str(refused.value).splitlines()
    assert message.startswith(f"{loser}: ") and told in message


def test_includes_in_an_order_in_which_one_is_undone_are_refused(tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text("include 'gin/strategies/ddp.gin'\ninclude 'gin/runs/digits.gin'\n")
    with pytest.raises(gin_config.Mistakes, match=r"then include 'strategies/ddp.gin' in this"):
        load([str(mine)])
    mine.write_text("train.num_steps = 3\ninclude 'gin/runs/digits.gin'\n")
    with pytest.raises(gin_config.Mistakes, match=r"mine.gin:1: .* Move the include above it"):
        load([str(mine)])


def test_files_and_bindings_are_read_in_their_order(tmp_path):
    first, second = tmp_path / "first.gin", tmp_path / "second.gin"
    first.write_text("train.num_steps = 3\ntrain.seed = 1\n")
    second.write_text("include 'gin/models/mlp.gin'\nmlp.dropout_rate = 0.1\ntrain.seed = 2\n")
    config = load([DIGITS_GIN, str(first), str(second)], ["mlp.dropout_rate = 0.3"])
    assert config.origin("train.num_steps") == f"{first}:1"
    assert config.origin("train.seed") == f"{second}:3"
    assert config.origin("mlp.dropout_rate") == "--gin.mlp.dropout_rate"


def test_a_file_that_is_used_may_bind_parameters_that_the_run_does_not_use(tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text("convnet.dropout_rate = 0.1\nmlp.widths = (32,)\n")
    config = load([DIGITS_GIN, str(mine)])
    assert [str(binding) for binding in config.unused] == ["mlp.widths = (32,)"]
    for line in ("train.seed = 1", "mlp.dropout_rate = 0.1"):  # settings of train, or no use
        mine.write_text(f"{line}\nmlp.widths = (32,)\n")
        with pytest.raises(gin_config.Mistakes, match="this run never calls mlp"):
            load([DIGITS_GIN, str(mine)])


def test_a_macro_for_a_model_that_does_not_use_it_is_refused(tmp_path):
    """Otherwise a model without COMPUTE_DTYPE would compute in float32 under precision/f16."""
    mine = tmp_path / "mine.gin"
    mine.write_text("train.model = @mlp()\nmlp.num_classes = 10\n")
    with pytest.raises(gin_config.Mistakes, match="nothing uses %COMPUTE_DTYPE"):
        load([DIGITS_GIN, str(mine), "gin/precision/f16.gin"])
    mine.write_text(mine.read_text() + "mlp.dtype = %COMPUTE_DTYPE\n")
    assert load([DIGITS_GIN, str(mine), "gin/precision/f16.gin"]).origin("COMPUTE_DTYPE")


def test_a_data_set_may_offer_a_macro_that_a_model_does_not_use(tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text("train.model = @mlp()\nmlp.num_classes = 10\n")
    config = load([DIGITS_GIN, str(mine), "gin/data/mnist.gin"])
    assert "NUM_CLASSES = 10" in map(str, config.unused)


def test_modules_of_the_last_release_are_imported_by_their_new_names(tmp_path, capsys):
    mine = tmp_path / "mine.gin"
    mine.write_text("import research_dp.training.optim as research_dp4\ntrain.seed = 1\n")
    load([DIGITS_GIN, str(mine)], ["plan.max_wire_ratio = 1.01"])
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{mine}:1: research_dp.training.optim is now research_dp.training.optimizers" in told
    mine.write_text("from research_dp.planning import budget\nplan.max_wire_ratio = 1.01\n")
    load([DIGITS_GIN, str(mine)])
    assert (
        "research_dp.planning.budget is now research_dp.planning.limits" in capsys.readouterr().err
    )


def test_leftovers_of_another_strategy_are_refused(refused):
    mine = "train.strategy = @data_parallel()\ndata_parallel.name = 'mine'\n"
    told = refused(mine).splitlines()
    assert "strategies/fsdp.gin:11: data_parallel.gather = @gather_params is left" in told[3]
    assert "mine.gin:1 chose another train.strategy than strategies/fsdp.gin:5" in told[3]


def test_what_is_allowed_is_bound(tmp_path):
    config = load(["gin/runs/digits.gin"], ["mlp.widths = (32,)"], allow_unused=True)
    assert [str(binding) for binding in config.unused] == ["mlp.widths = (32,)"]


@pytest.mark.parametrize("stem", stems())
def test_shipped_files_have_no_mistakes_in_any_combination(stem):
    def files(folder):
        return sorted((ROOT / "gin" / folder).glob("*.gin"))

    images = [p for p in files("data") if "image" in p.read_text()]
    assert len(images) >= 4
    for model in files("models"):
        if "NUM_CLASSES" in model.read_text():
            for data in images:
                chosen = [f"gin/strategies/{stem}.gin", str(model), str(data)]
                load(["gin/runs/digits.gin", *chosen])
    for optimizer in files("optim"):
        chosen = [f"gin/strategies/{stem}.gin", str(optimizer), "gin/options/tf_data.gin"]
        load(["gin/runs/digits.gin", *chosen])


@pytest.mark.parametrize("stem", [s for s in stems() if s not in ("single", "spmd", "spmd_fsdp")])
def test_precision_files_go_with_every_strategy_that_has_such_collectives(stem):
    for precision in sorted((ROOT / "gin" / "precision").glob("*.gin")):
        load(["gin/runs/digits.gin", f"gin/strategies/{stem}.gin", str(precision)])


def test_what_is_called_is_what_the_checks_say(main, tmp_path):
    """The operative configuration, which gin writes as functions are called, has no more."""
    flags = ["--gin.train.num_steps=1", f"--workdir={tmp_path}"]
    assert main(DIGITS, *flags).returncode == 0
    again = load([str(tmp_path / "operative_config.gin")])
    first = load(["gin/runs/digits.gin"])
    assert again.functions <= first.functions
    assert not again.unused


@pytest.mark.parametrize("stem", stems())
def test_a_file_may_include_a_run_and_swap_a_part_of_it(stem, tmp_path):
    mine = tmp_path / "mine.gin"
    mine.write_text(
        f"include 'gin/runs/digits.gin'\ninclude 'gin/strategies/{stem}.gin'\n"
        "include 'gin/models/mlp.gin'\n"
    )
    load([str(mine)])


def test_wrong_numbers_of_an_optimizer_are_told_in_words_not_in_functions(refused):
    told = refused("optax.adamw.b1 = 'x'")
    assert "give a number" in told and "@gather" not in told
    assert "a finite number" in refused("train.max_grad_norm = 1e999")
    told = refused("image_classification.mean = (1e999,)")
    assert told.startswith("error: mine.gin:1: ") and "finite numbers" in told


def test_the_name_of_further_arguments_is_no_parameter(refused):
    gin.register("of_many", module="mine")(lambda *args: args)
    assert "of_many has no parameter 'args'" in refused("s/of_many.args = (1,)")


def test_what_a_caller_passes_cannot_be_bound_and_is_no_hint(refused):
    told = refused("image_classification.features = (1,)")
    assert "what calls image_classification passes this, so no binding has an effect" in told
    assert "image_classification" not in refused("include 'models/mlp.gin'\nmlp.features = (1,)")


def test_a_file_that_is_no_text_is_told(tmp_path):
    file = tmp_path / "mine.gin"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(gin_config.Mistakes, match="UTF-8"):
        load([str(file)])
    file.write_bytes(b"\xef\xbb\xbftrain.num_steps = 3\n")  # a byte-order mark
    assert load([DIGITS.partition("=")[2], str(file)]).origin("train.num_steps") == f"{file}:1"


def test_scopes_that_share_a_binding_are_both_followed():
    bindings = [
        "convnet.dtype = %LEAF",
        "LEAF = 'bfloat16'",
        "a/shard_params.min_weight_size = 1024",
        "data_parallel.shard = @a/shard_params",
    ]
    config = load(["gin/runs/digits.gin"], bindings, allow_unused=True)
    assert config.origin("convnet.dtype")


def test_an_include_is_given_as_a_file(refused):
    told = refused(flags=["--gin_bindings=include 'gin/strategies/ddp.gin'"])
    assert "give --gin_file=gin/strategies/ddp.gin" in told


def test_a_number_in_place_of_a_schedule_is_noted_once(capsys):
    flags = [DIGITS, "--gin_file=models/mlp.gin", "--gin.adamw.learning_rate=0.1"]
    assert train.main([*flags, "--dry_run"]) == 0
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "Note" in line]
    for part in (
        "= 0.1 replaces the schedule",
        "so warmup_cosine.peak_value = 0.003 (",
        ".gin:16)",
    ):
        assert part in note
    for setting in ("warmup_cosine.peak_value=0.1", "optax.adamw.learning_rate=@warmup_cosine()"):
        assert train.main([*flags[:2], f"--gin.{setting}", "--dry_run"]) == 0
        assert "Note" not in capsys.readouterr().err


@pytest.mark.parametrize("opener", ["[", "(", "{'a': ", "[\n", "]"])
def test_thousands_of_brackets_are_told_at_once(refused, opener):
    told = refused("train.seed = 1\ntrain.num_steps = " + opener * 5000)
    assert "mine.gin" in told and len(told) < 500
