"""The plan: its rows, what they are held to, and what its command says of mistakes."""

import json
import re
import types

import jax
import pytest

from research_dp.analysis import topologies
from research_dp.analysis.topologies import Topology, topology
from research_dp.commands import cli, configured, failures, jax_setup, plan_candidates
from research_dp.commands import plan as plan_command
from research_dp.distributed.mesh import chips
from research_dp.errors import UsageError
from research_dp.planning import estimate as estimate_lib
from research_dp.planning import report
from research_dp.planning.limits import Budget
from research_dp.planning.row import CollectiveTotal, Row, fastest_first
from research_dp.planning.tables import prediction_error, tables
from research_dp.strategies import StrategyConfig
from tests.support import certified
from tests.support.plan_rows import GPUS, absent, make_row
from tests.support.runs import WITH_MLP
from tests.support.strategies import recipe

DIGITS, MLP = WITH_MLP

# What the plan of a strategy must say.
KEYS = [
    *("fits", "state_bytes", "temp_bytes", "peak_bytes", "wire_bytes", "min_wire_bytes"),
    *("collectives", "hidden_fraction", "flops", "predicted_seconds", "predicted_parts", "bound"),
]


def plan(*flags):
    """The exit status of the command, run in this process."""
    with configured.speaking_flags():
        return plan_command.command(**cli.parse("plan", flags))


@pytest.mark.parametrize(
    ("by", "platforms", "named", "has_accelerators", "then"),
    [
        ("script", None, "", True, None),
        ("script", None, "", False, "cpu"),  # compilers that look for absent devices complain
        ("script", "tpu,cpu", "", True, "tpu,cpu"),  # JAX itself names the TPU of a TPU's machine
        ("command", None, "", True, "cpu"),
        ("command", "tpu,cpu", "", True, "cpu"),
        ("command", "cuda", "cuda", True, "cuda"),
    ],
)
def test_accelerators_are_started_where_a_script_may_train_on_them_after_a_plan(
    by, platforms, named, has_accelerators, then, planning
):
    started = planning(platforms, named, has_accelerators)
    with pytest.raises(UsageError, match="asked for h100:1x8"):
        if by == "script":
            plan_command.plan(["runs/digits.gin", "models/mlp.gin"], topology="h100:1x8")
        else:
            plan(*WITH_MLP, "--topology=h100:1x8")
    assert jax.config.values["jax_platforms"] == then
    assert started == (["devices"] if by == "script" else [])


def test_devices_that_another_process_holds_are_a_mistake_with_advice(planning, monkeypatch):
    planning(None, "", has_accelerators=True)

    def devices():
        raise RuntimeError("Unable to initialize backend 'tpu': ABORTED: in use.\nmore")

    monkeypatch.setattr(plan_command.jax, "devices", devices)
    with pytest.raises(UsageError) as told:
        plan_command.plan(["runs/digits.gin", "models/mlp.gin"], topology="h100:1x8")
    assert str(told.value).endswith("ABORTED: in use. JAX_PLATFORMS=cpu leaves them alone.")


@pytest.fixture
def planning(monkeypatch, capsys):
    """Prepares a plan that ends where a compiler is asked; returns what it starts before."""
    started, before = [], jax.config.values["jax_platforms"]

    def refuse(name):
        raise UsageError(f"asked for {name}")

    def prepare(platforms, named, has_accelerators):
        monkeypatch.setattr(jax_setup, "_may_have_accelerators", lambda: has_accelerators)
        monkeypatch.setattr(plan_command.jax, "devices", lambda: started.append("devices"))
        monkeypatch.setattr(topologies, "topology", refuse)
        monkeypatch.setenv("JAX_PLATFORMS", named)
        jax.config.update("jax_platforms", platforms)
        return started

    yield prepare
    jax.config.update("jax_platforms", before)


def row(name, *, needed=10e9, state=5e9, step=0.1, **others):
    parts = {
        "compute": step,
        "memory": 0.01,
        "network_inside": 0.0,
        "network_across": 0.02,
        "exposed": 0.01,
    }
    given = {
        "needed_bytes": int(needed),
        "state_bytes": int(state),
        "available_bytes": int(15e9),
        "fits": needed <= 15e9,
        "predicted_seconds": step,
        "predicted_parts": parts,
        "bound": "compute",
        "problem": None if needed <= 15e9 else "does not fit: needs too much",
    }
    return make_row(name, **{**given, **others})


def test_advice_names_the_fastest_that_fits_and_what_stops_the_others():
    rows = [
        row("slow", step=0.2),
        row("quick", step=0.1),
        row("large", needed=20e9, step=0.05),
        row("huge", needed=30e9, state=29e9, step=0.05),
        Row("odd", problem="refused: it cannot be"),
    ]
    best, slow, large, huge, odd, *_ = report.words(rows, GPUS)
    assert best.startswith("Fastest that fits: quick, 100.0 ms per step")
    assert "10.0 ms of communication are exposed" in best
    assert slow.startswith("slow: 2.0 times as long")
    assert "whether it does with fewer examples at a time" in large
    assert "its state must be sharded" in huge
    assert odd == "odd refused: it cannot be."
    assert report.words(rows[2:], GPUS)[0].startswith("Nothing of this fits")


def test_steps_whose_ranges_overlap_are_called_equal():
    rows = [row("a", step=0.1), row("b", step=0.12), row("c", step=0.2)]
    for one in rows:
        one.predicted_range = (one.predicted_seconds / 1.15, one.predicted_seconds * 1.15)
    _, near, far, *_, last = report.words(rows, GPUS)
    assert near.startswith("b: equal within the range (+20%), 120.0 ms")
    assert far.startswith("c: 2.0 times as long")
    assert "published steps" in last and last.endswith("eight of ten are within 17%.")
    assert "(equal within the range)" in report.changes([rows[1]], rows[:1], GPUS)[0]
    assert "b +20% (equal within the range), c +100%" in report.summary(rows, GPUS)[1]
    rows[2].predicted_range = (0.9, 1.5)
    (_, step) = tables(rows, GPUS)
    assert [row[list(step.columns).index("range ms:")] for row in step.rows] == [
        *("87-115", "104-138", "900-1,500")
    ]
    rows[0].measured_seconds = 0.1
    assert not rows[1].is_as_fast_as(rows[0]), "one of them was measured"
    unknown = absent("v6e-64", "v6e", 64, 8)
    assert "v6e is not calibrated" in report.words(rows, unknown)[-2]


def test_advice_says_what_padding_costs():
    rows = [row("a", state_bytes=1000, padding_bytes=30), row("b", state_bytes=1000)]
    (told,) = (x for x in report.words(rows, GPUS) if x.startswith("Padding"))
    assert told == "Padding, where the devices do not divide a parameter: a 3.0%."


def test_advice_says_what_latency_and_wide_dtypes_cost():
    sent = {"kind": "all-gather", "axes": "fsdp", "dtype": "f32", "purpose": "all-gather"}
    gathers = CollectiveTotal(**sent, devices=1024, count=9, wire_bytes=8e9)
    inside = CollectiveTotal(**sent, devices=8, count=1, wire_bytes=9e9)
    parts = {**row("a").predicted_parts, "latency": 0.004}
    least = {"narrow_wire_bytes": 4e9, "narrow_file": "f.gin"}
    wide = {"wire_bytes": {"total": 9e9}, "min_wire_bytes": 8e9, **least}
    found = row("a", predicted_parts=parts, collectives=[gathers, inside], **wide)
    # A TPU's compiler may send an all-reduce for a scatter: that is no matter of dtypes.
    narrow = row("b", min_wire_bytes=4e9, wire_bytes={"total": 8e9}, **least)
    best, _, advice, *_ = report.words([found, narrow], GPUS)
    assert "are exposed, 4.0 of them for latency in groups of 1,024 devices" in best
    assert advice == "With f.gin fewer bytes are possible: a 4.00 GB instead of 8.00 GB."
    assert "in bf16:" in tables([found], GPUS)[1].columns
    assert "in bf16:" not in tables([narrow], GPUS)[1].columns


def test_times_of_nominal_rates_rank_nothing_unless_measured():
    """A CPU's predicted order was the reverse of the measured one."""
    where = topology("cpu:8")
    sent = [{"wire_bytes": {"total": total}, "mesh": {"data": 8}} for total in (2e9, 1e9)]
    rows = [row("a", step=0.1, needed=8e9, **sent[0]), row("b", step=0.2, **sent[1])]
    smallest, unranked, *_ = report.words(rows, where)
    assert smallest == (
        "Least memory: a, 8.00 GB per device. Fewest wire bytes: b, 1.00 GB per device and step."
    )
    assert unranked.startswith("No ranking by time") and "--measure" in unranked
    assert not re.search(r"\bms\b|Fastest|faster|slower", " ".join(report.words(rows, where)))
    for shown in tables(rows, where):
        assert not [head for head in shown.heads if "ms" in head.split() or head == "MFU"]
    memory, step, _ = tables(rows, where, verbose=True)
    assert "needed" in memory.heads and "compute ms" in step.heads
    assert "expected" not in step.heads, "no row has a cell there"
    assert step.title.endswith("; times follow from nominal rates")
    bf16 = row("a+bf16", step=0.05, needed=7e9, batch_size=rows[0].batch_size, **sent[1])
    (change,) = report.changes([bf16], rows, where)
    assert "7.00 GB instead of 8.00 GB" in change and " ms" not in change
    rows[0].measured_seconds, rows[1].measured_seconds = 0.9, 0.3
    assert report.words(rows, where)[0].startswith("Fastest that fits: b, 300.0 ms per step")


def test_measured_times_rank_where_all_were_measured():
    rows = [row("a", step=0.1, measured_seconds=0.9), row("b", step=0.2, measured_seconds=0.3)]
    assert [r.strategy for r in fastest_first(rows)] == ["b", "a"]
    rows[1].measured_seconds = None
    assert [r.strategy for r in fastest_first(rows)] == ["a", "b"]
    assert prediction_error(rows[0]) == pytest.approx(0.1 / 0.9 - 1)


def test_a_budget_names_what_is_above_it():
    sent = {"wire_bytes": {"total": 101.0}, "min_wire_bytes": 100.0, "peak_bytes": 50}
    over = dict(Budget(max_wire_ratio=1.005, max_peak_bytes=49).exceeded(row("x", **sent)))
    assert "1.01 times the least, more than 1.005" in over["plan.max_wire_ratio"]
    assert "50 bytes a device at its peak, more than 49" in over["plan.max_peak_bytes"]
    assert not list(Budget(1.02, 50).exceeded(row("x", **sent)))
    # Nothing must be sent: nothing may be.
    assert list(Budget(1.0, None).exceeded(row("x", **{**sent, "min_wire_bytes": 0.0})))
    none = {"wire_bytes": {"total": 0.0}, "min_wire_bytes": 0.0}
    assert not list(Budget(1.0, None).exceeded(row("x", **none)))
    # It does not even compile: what the compiler says that it needs counts.
    assert list(Budget(None, 49).exceeded(row("x", peak_bytes=None)))


def test_what_is_not_known_is_not_within_a_budget():
    lost = Row("x", problem="refused: it cannot be")
    over = dict(Budget(1.01, 50).exceeded(lost))
    assert over == {
        "plan.max_wire_ratio": "x sends an unknown number of bytes: it refused: it cannot be.",
        "plan.max_peak_bytes": "x needs an unknown number of bytes: it refused: it cannot be.",
    }
    assert not list(Budget(None, None).exceeded(lost))


def test_a_refused_strategy_exceeds_the_budget(monkeypatch, capsys, tmp_path):
    def made(name, strategy, spec, where, dump):
        if name == "zero1":
            raise UsageError("it cannot be.")
        figures = {"wire_bytes": {"total": 1.0}, "min_wire_bytes": 1.0, "peak_bytes": 1}
        return estimate_lib.Compiled(row(name, **figures), None, None)

    monkeypatch.setattr(estimate_lib, "compile_row", made)
    wrong = tmp_path / "wrong.gin"
    wrong.write_text("data_parallel.nothing = 1\n")
    flags = [DIGITS, "--topology=cpu:8", "--gin.plan.max_wire_ratio=1.5"]
    assert plan(*flags, "--strategies=ddp") == 0
    assert not capsys.readouterr().err.count("error")
    assert plan(*flags, f"--strategies=ddp,zero1,{wrong}") == 1
    refused, mistaken = (e for e in capsys.readouterr().err.splitlines() if e.startswith("error"))
    told = "zero1 sends an unknown number of bytes: it refused: it cannot be. plan.max_wire_ratio"
    assert refused == f"error: {told} is bound in --gin.plan.max_wire_ratio."
    assert "wrong sends an unknown number of bytes: it refused:" in mistaken
    assert "nothing" in mistaken
    # Bindings that serve another candidate only, or that one completes, do not end the plan.
    others = tmp_path / "others.gin"
    others.write_text("include 'gin/strategies/fsdp.gin'\nnumber = 1\n")
    for more in ("--gin.shard_params.min_weight_size=64", "--gin.train.seed=%number"):
        assert plan(*flags, more, f"--strategies={others},{wrong}") == 1


def test_strategies_are_named_by_stem_by_path_and_with_more_files():
    every = [c.name for c in plan_candidates.of(["all"])]
    assert {"single", "ddp", "fsdp", "hsdp", "zero2"} <= set(every)
    (found,) = plan_candidates.of(["fsdp+h100+bf16_gather"])
    assert found.name == "fsdp+h100+bf16_gather"
    assert found.files == (
        "strategies/fsdp.gin",
        "options/h100.gin",
        "precision/bf16_gather.gin",
    )
    (path,) = plan_candidates.of(["strategies/ddp.gin"])
    assert (path.name, path.files) == ("ddp", ("strategies/ddp.gin",))
    with pytest.raises(UsageError, match=r"no shipped file 'fsdq'.* Did you mean fsdp"):
        plan_candidates.of(["fsdq"])
    with pytest.raises(UsageError, match=r"no file my\.gin"):
        plan_candidates.of(["my.gin"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--topology=h100"], "topology 'h100' is not known"),
        (["--topology=v9-64"], "topology 'v9-64' is not known"),
        (["--topology=cpu:8", "--gin.train.batch_size=100"], "100 does not divide .* 96 or 104"),
        (["--topology=cpu:8", "--gin.train.num_stpes=3"], "Did you mean num_steps"),
        # In vain under each of them; let through where it has an effect under one.
        (
            ["--topology=cpu:8", "--strategies=ddp,zero1", "--gin.gather_params.gather_dtype=f16"],
            "never calls gather_params",
        ),
        (["--topology=h100:8x8", "--measure"], "--measure needs devices that are present"),
        (["--topology=h100:8x8", "--cpu_devices=8"], "use it with --topology=here"),
        (["--topology=cpu:8", "--gin.plan.max_wire_ratio=-1"], "give a positive number"),
        (["--topology=cpu:8", "--sizes=4,16"], "--sizes=16: .*--cpu_devices=16 makes as many"),
    ],
)
def test_mistakes_are_told(flags, told):
    with pytest.raises(UsageError, match=told):
        plan(DIGITS, *flags)


@pytest.mark.slow
def test_other_sizes_are_compiled_with_as_many_examples_a_device(capsys, tmp_path):
    file = tmp_path / "plan.json"
    fixed = tmp_path / "fixed.gin"
    axes = "make_mesh.axes = {'data': 2, 'fsdp': 4}"
    fixed.write_text(f"include 'gin/strategies/hsdp.gin'\n{axes}\n")
    flags = ["--topology=cpu:8", f"--strategies=fsdp,{fixed},single", "--sizes=4,2,8"]
    assert plan(DIGITS, MLP, *flags, f"--json={file}") == 0
    told = json.loads(file.read_text())
    fsdp, hsdp, single = (told["sizes"][name] for name in ("fsdp", "fixed", "single"))
    assert fsdp.pop("8") == told["strategies"]["fsdp"]
    each = {8: told["strategies"]["fsdp"]["batch_size"] / 8}
    for devices, row in fsdp.items():
        assert row["mesh"] == {"data": 1, "fsdp": int(devices)}
        assert row["batch_size"] == each[8] * int(devices)
        assert row["opt_bytes"] > told["strategies"]["fsdp"]["opt_bytes"]
    assert list(fsdp) == ["2", "4"] and list(single) == ["1"]
    assert hsdp["8"]["fits"]
    assert hsdp["4"]["problem"].startswith("refused: ")
    assert "By number of devices" in capsys.readouterr().out


def test_why_a_strategy_is_refused_is_told_without_gins_calls():
    error = UsageError("it cannot be.\n  In call to configurable 'data_parallel' (<f at 0x7f>)")
    assert Row.refused("x", error).problem == "refused: it cannot be."


@pytest.mark.slow
def test_what_cannot_be_built_is_a_row_beside_the_others(capsys, tmp_path):
    file = tmp_path / "plan.json"
    bad = tmp_path / "bad.gin"
    bad.write_text("include 'gin/strategies/ddp.gin'\ndata_parallel.sync = None\n")
    flags = [
        "--topology=cpu:8",
        f"--strategies=ddp,{bad}",
        f"--json={file}",
        "--dump_hlo",
        tmp_path,
    ]
    assert plan(DIGITS, MLP, *map(str, flags)) == 0
    found = json.loads(file.read_text())["strategies"]
    assert found["bad"]["problem"].startswith("refused: data_parallel.sync = None on 8 devices")
    assert not found["bad"]["fits"]
    assert found["ddp"]["fits"]
    assert set(KEYS) <= set(found["ddp"])
    assert not [key for key in KEYS if found["ddp"][key] is None]
    moved = found["ddp"]["collectives"]
    assert moved and all(one["count"] > 0 and one["devices"] > 1 for one in moved)
    sent = found["ddp"]["wire_bytes"]
    for how in ("by_kind", "by_axis", "by_dtype"):
        assert sum(sent[how].values()) == pytest.approx(sent["total"])
    assert "HloModule" in (tmp_path / "ddp.txt").read_text()
    assert "bad refused" in capsys.readouterr().out


# Strategies whose collectives are written out.
WRITTEN = ["ddp", "zero1", "zero2", "fsdp", "fsdp_keep", "hsdp"]


@pytest.mark.slow
def test_shipped_strategies_send_the_least(tmp_path):
    """The budget that CI holds them to: a model all of whose matrices are sharded.

    That of GPUs is in tests/planning/test_recorded_plan.py, which compiles all of them.
    """
    file = tmp_path / "plan.json"
    flags = [DIGITS, MLP, f"--strategies={','.join(WRITTEN)}", "--topology=cpu:8"]
    flags += ["--gin.train.accumulation_steps=2", f"--json={file}"]
    flags += ["--gin.shard_params.min_weight_size=64", "--gin.plan.max_wire_ratio=1.01"]
    assert plan(*flags) == 0
    found = json.loads(file.read_text())["strategies"]
    assert list(found) == WRITTEN
    for name, row in found.items():
        assert row["fits"], name
        assert row["wire_ratio"] <= 1.01, name


def test_the_state_of_slots_is_a_column_where_there_is_some(tmp_path, capsys):
    file = tmp_path / "plan.json"
    flags = ["--strategies=ddp,examples/ddp_error_feedback.gin", "--topology=cpu:8"]
    assert plan(DIGITS, MLP, *flags, f"--json={file}") == 0
    found = json.loads(file.read_text())["strategies"]
    sizes = [row["slots_bytes"] for row in found.values()]
    assert sizes == [0, found["ddp"]["params_bytes"]], "an error for each parameter"
    assert "slots" in capsys.readouterr().out
    (memory, _) = tables([make_row("ddp", slots_bytes=0)], GPUS)
    assert not any("slots" in str(column) for column in memory.columns)


def test_two_files_of_one_name_are_not_one_row(tmp_path):
    own = tmp_path / "fsdp.gin"
    own.write_text("")
    with pytest.raises(UsageError, match="would both be row 'fsdp'"):
        plan_candidates.of(["fsdp", str(own)])
    assert [c.name for c in plan_candidates.of(["fsdp", "ddp", "fsdp"])] == ["fsdp", "ddp"]


def test_a_plan_that_cannot_be_written_is_not_made(tmp_path):
    with pytest.raises(UsageError, match=r"--json=.* cannot be written: No such file"):
        plan(DIGITS, MLP, "--topology=cpu:8", f"--json={tmp_path / 'no' / 'plan.json'}")


def test_a_program_that_cannot_be_read_still_says_what_it_needs(monkeypatch):
    def unreadable(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: newer than the reader\nmore")

    monkeypatch.setattr(estimate_lib, "read", unreadable)
    strategy, spec = recipe("ddp"), certified.small_spec("linen")
    made = estimate_lib.compile_row("ddp", strategy, spec, topology("cpu:8")).row
    assert made.fits
    assert made.needed_bytes > made.state_bytes
    assert made.problem == "its program cannot be read: INTERNAL: newer than the reader"
    assert fastest_first([made]) == []
    said = report.words([made], topology("cpu:8"))
    assert "ddp fits, but its program cannot be read: INTERNAL: newer than the reader." in said


def test_a_program_whose_least_is_not_known_is_a_row_like_others(tmp_path):
    recipe("fsdp")
    strategy = recipe("fsdp", "data_parallel.gather = @x/gather_params")
    spec, where = certified.small_spec("linen"), topology("cpu:8")
    made = estimate_lib.compile_row("a/b", strategy, spec, where, tmp_path)
    assert made.row.fits
    assert made.row.wire_total > 0
    assert made.row.wire_ratio is None
    assert "the least that it must send is not known: gather_params" in made.row.problem
    assert (tmp_path / "a_b.txt").exists()


def device(platform, **stats):
    return types.SimpleNamespace(
        process_index=0, platform=platform, memory_stats=lambda: dict(stats) or None
    )


def test_what_is_available_is_what_jax_took_where_devices_are_there():
    def of(name, **options):
        return Topology(name, chips()[name], **options).memory_budget()[0]

    nominal = int(chips()["h100"].memory_bytes * 0.92)
    assert of("h100", devices=(device("gpu"),)) == nominal
    assert of("h100", devices=(device("gpu", bytes_limit=5),), are_present=True) == 5
    assert of("h100", devices=(device("gpu"),), are_present=True) == nominal
    assert of("cpu", devices=(device("cpu", bytes_limit=5),), are_present=True) is None


def test_what_was_measured_gives_the_rates_and_what_cannot_be_run_is_told(monkeypatch):
    one = row("x", step=0.1, mfu=0.5, tokens_per_second=1000.0, examples_per_second=10.0)
    monkeypatch.setattr(estimate_lib, "_median_seconds", lambda made: 0.2)
    estimate_lib.measure(estimate_lib.Compiled(one, None, None))
    rates = one.mfu, one.tokens_per_second, one.examples_per_second
    assert (one.measured_seconds, *rates) == (0.2, 0.25, 500.0, 5.0)

    def too_much(made):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    monkeypatch.setattr(estimate_lib, "_median_seconds", too_much)
    other = row("y")
    estimate_lib.measure(estimate_lib.Compiled(other, None, None))
    assert not other.fits
    assert other.problem == "cannot be run here: RESOURCE_EXHAUSTED: Out of memory"


def test_groups_of_hosts_are_among_the_variants():
    fast = row("fsdp", step=0.1, mesh={"data": 1, "fsdp": 1024})
    candidate = plan_candidates.Candidate("fsdp", ("strategies/fsdp.gin",))
    for where, expected in (
        (absent("h100:128x8", "h100", 1024, 128), ["hsdp 128 x 8", "hsdp 16 x 64", "hsdp 2 x 512"]),
        (absent("h100:1x8", "h100", 8, 1), []),
        (absent("h100:8x1", "h100", 8, 8), []),
    ):
        found = plan_candidates.variants(candidate, fast, where)
        assert [one.name for one in found if one.name.startswith("hsdp")] == expected


# ---- One strategy cannot be built: the others have their rows ----


def injured(monkeypatch, error):
    """Has one strategy's trace fail as it does where JAX refuses its devices."""
    original = StrategyConfig.build

    def build(recipe, spec):
        if recipe.name == "zero1":
            raise error
        return original(recipe, spec)

    monkeypatch.setattr(StrategyConfig, "build", build)


def test_an_error_of_one_strategy_is_a_row_beside_the_others(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(failures, "is_of_users_code", lambda error: False)  # it is this file's
    injured(monkeypatch, ValueError("devices must form a subcube\nmore"))
    file = tmp_path / "plan.json"
    flags = [DIGITS, MLP, "--topology=cpu:8", "--gin.mlp.widths=(4,)"]
    assert plan(*flags, "--strategies=zero1,single", f"--json={file}") == 0
    found = json.loads(file.read_text())["strategies"]
    assert found["zero1"]["problem"] == "refused: ValueError: devices must form a subcube"
    assert found["single"]["fits"]
    with pytest.raises(UsageError, match=r"^zero1: refused: ValueError: devices must "):
        plan(*flags, "--strategies=zero1")


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a fault of this package"),
        ValueError("a fault of the user's own code"),
    ],
)
def test_a_fault_is_not_taken_for_a_strategy_that_cannot_be_planned(monkeypatch, error):
    injured(monkeypatch, error)
    with pytest.raises(type(error), match="a fault of") as raised:
        plan(DIGITS, MLP, "--topology=cpu:8", "--strategies=zero1")
    assert not isinstance(raised.value, UsageError)
