"""Builds recorded runs again: to measure what rounding explains, and to plan them for devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from research_dp.analysis.program_cost import link_rate
from research_dp.analysis.topologies import Topology
from research_dp.certification import noise
from research_dp.certification.noise import Noise
from research_dp.commands import jax_setup
from research_dp.commands.certify import bench_of
from research_dp.commands.configured import Run as Configured
from research_dp.commands.plan_candidates import built_under
from research_dp.comparison.comparison import Comparison, LinkTimes
from research_dp.comparison.runs import Run
from research_dp.comparison.verdicts import Verdict
from research_dp.console import Report
from research_dp.planning import estimate
from research_dp.planning.row import Row
from research_dp.runs.workdir import config_of
from research_dp.training.train import configured

_DIGITS = [digit * 10.0**power for power in range(6, 12) for digit in (1, 2, 4)]
_MOST_EVALUATIONS = 5  # for which a bound is measured
LINK_RATES = [rate for rate in _DIGITS if rate <= 4e11]  # bits/s: 1 Mbit/s to 400 Gbit/s


def measure_noise(
    runs: Sequence[Run],
    doubts: Iterable[Verdict],
    steps: int,
    cpu_devices: int | None,
    *,
    imports: Sequence[str],
    report: Report,
) -> list[Noise]:
    """What rounding explains, for each precision of gradients on which a verdict depends.

    It is that of the configuration of the first run in doubt.
    """
    by_name = {run.name: run for run in runs if run.is_run}
    pairs = [(v.a, v.b) for v in doubts if {v.a, v.b} <= by_name.keys()]
    if not steps or not pairs:
        return []
    report("Measuring what rounding explains")
    config = Configured(imports=imports).load(saved=str(config_of(by_name[pairs[0][1]].folder)))
    jax_setup.set_up_devices(cpu_devices)
    bench, data = bench_of(config, "single", configured())
    precisions = {max(by_name[name].precision for name in pair) for pair in pairs}
    # Evaluations of five trajectories take long: the last counts most, and a few before it.
    columns = {name: {*by_name[name].column("eval", "step")} for pair in pairs for name in pair}
    both = set[float]().union(*(columns[a] & columns[b] for a, b in pairs))
    known = sorted(int(step) for step in both if 0 < step <= steps)
    few = np.linspace(0, len(known) - 1, min(len(known), _MOST_EVALUATIONS)).astype(int)
    evaluated = [known[i] for i in few]
    return [
        noise.measure(
            dataclasses.replace(bench, precision=precision),
            data,
            steps=steps,
            evaluated=evaluated,
            report=report,
        )
        for precision in sorted(precisions)
    ]


@jax_setup.without_compilation_cache()
def with_plan(
    comparison: Comparison, where: Topology, *, imports: Sequence[str], report: Report
) -> Comparison:
    """The comparison with a plan of each run for some devices, and its times by link speed."""
    own = 8 * link_rate(where)
    rates = sorted({*LINK_RATES, own})
    rows: dict[str, Row] = {}
    seconds: dict[str, list[float]] = {}
    for run in (run for run in comparison.runs if run.is_run):
        report(f"Compiling {run.name} for {where.name}")
        configured = Configured(imports=imports)
        load_it = functools.partial(configured.load, saved=str(config_of(run.folder)))
        compile_it = functools.partial(estimate.compile_row, run.name, where=where)
        made = built_under(configured, load_it, run.name, where.devices, compile_it)
        rows[run.name] = made if isinstance(made, Row) else made.row
        if not isinstance(made, Row) and made.cost is not None:
            seconds[run.name] = [made.cost.seconds_at(rate / 8) for rate in rates]
    return dataclasses.replace(
        comparison,
        topology=where.name,
        is_timed=where.chip.platform != "cpu",
        planned=rows,
        links=LinkTimes(rates, own, seconds),
    )
