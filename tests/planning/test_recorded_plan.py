"""What each strategy's compiled step needs for lm_1b, compared with tests/golden/lm_1b_*.json.

The model is the one of experiments/plan/lm_1b.gin, with all its layers: with fewer, other
collectives would be combined. XLA compiles a loop over layers once, so that depth costs no time.
"""

import json
import math
import subprocess
import sys

import pytest

from experiments.limits.lm_1b import CASES
from tests.support import golden
from tests.support.compilers import needs_compiler
from tests.support.repository import ROOT

FIGURES = ("params_bytes", "opt_bytes", "state_bytes", "batch_bytes", "min_wire_bytes", "flops")
TEMPORARY = 0.005  # the part by which temporary memory may differ
PLATFORMS = {"h100:8x8": "gpu", "v5e-64": "tpu"}
# Strategies whose collectives are written out: on GPUs they send the least, so no option is needed.
WRITTEN = ["ddp", "zero1", "zero2", "fsdp", "fsdp_keep", "hsdp"]
# On TPUs the others compile for minutes.
STRATEGIES = {"h100:8x8": "all", "v5e-64": "fsdp,fsdp_keep,fsdp+tpu_torus"}
# Cases of experiments/limits that are one of these programs, which is compiled once for both.
RECORDED = {"fsdp_keep": "fsdp_keep", "ddp bf16": "ddp", "fsdp, torus": "fsdp+tpu_torus"}


def figures(row):
    """Of a row of `plan --json`: what does not depend on the time of compiling."""
    lines = [
        f"{one['count']} x {one['kind']} for {one['purpose']}, {one['axes']}, {one['dtype']}, "
        f"groups of {one['devices']}: {one['wire_bytes']} bytes"
        for one in row["collectives"] or ()
    ]
    sent = row["wire_bytes"] and row["wire_bytes"]["total"]
    known = {name: row[name] for name in FIGURES}
    return {**known, "problem": row["problem"], "wire_bytes": sent, "collectives": lines}


EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_compiler(p)) for name, p in PLATFORMS.items()]
)
RECORDED_FOR = [
    pytest.param("h100:8x8", marks=[needs_compiler("gpu"), pytest.mark.exhaustive]),
    pytest.param("v5e-64", marks=[needs_compiler("tpu"), pytest.mark.exhaustive]),
]


@pytest.mark.parametrize("name", RECORDED_FOR)
def test_strategies_need_what_is_recorded(command, tmp_path, name):
    file = tmp_path / "plan.json"
    flags = ["--gin_file=experiments/plan/lm_1b.gin", f"--strategies={STRATEGIES[name]}"]
    flags += [f"--topology={name}", f"--json={file}"]
    done = command(*flags, module="research_dp.plan", timeout=1200)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["strategies"]
    found = {stem: figures(row) for stem, row in rows.items()}
    temporary = {stem: row["temp_bytes"] for stem, row in rows.items()}
    before = golden.recorded(
        f"lm_1b_{name.partition(':')[0]}", {"figures": found, "temporary": temporary}
    )
    differs = golden.changes(before["figures"], found)
    differs += [
        f"{stem}: {temporary[stem]:,} temporary bytes, recorded {expected:,}"
        for stem, expected in before["temporary"].items()
        if temporary[stem] != pytest.approx(expected, rel=TEMPORARY)
    ]
    assert not differs, "\n".join([*differs, f"If this is meant: {golden.command(__file__)}"])
    for stem in WRITTEN if PLATFORMS[name] == "gpu" else ():
        assert rows[stem]["fits"] and rows[stem]["wire_ratio"] <= 1.01, stem
    for case in {*CASES[name]} & {*RECORDED}:
        row, budget = rows[RECORDED[case]], CASES[name][case]
        assert budget.state is None and budget.collectives is None
        assert row["wire_bytes"]["total"] / 1e9 <= budget.wire
        assert row["temp_bytes"] / 1e9 <= (budget.temporary or math.inf)
        for_bytes = row["predicted_parts"]["exposed"] - row["predicted_parts"]["latency"]
        assert for_bytes * 1e3 <= (budget.waited or math.inf)


@pytest.mark.exhaustive
@EACH
def test_no_case_of_the_limits_exceeds_its_budget(command, name):
    """Bytes, memory and predicted waits, for the options of each kind of device."""
    cases = [f"--case={case}" for case in CASES[name] if case not in RECORDED]
    words = [sys.executable, "experiments/limits/lm_1b.py", name, "--budget", *cases]
    options = {"env": command.environment, "capture_output": True, "text": True, "timeout": 1200}
    done = subprocess.run(words, cwd=ROOT, **options)
    assert done.returncode == 0, done.stdout + done.stderr
