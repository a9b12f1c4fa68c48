"""Emulated clusters drawn at random: what a profile has the planner choose, against all configurations, measured.

Configurations priced over `HOPELESS` times the best are not measured, but for two as a control.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.cluster_ranks import measure_in_rank
from benchmarks.contenders import Case, Slept
from benchmarks.contenders.burst import Burst
from benchmarks.report.files import Recording, Row, load
from tests.support.drawn_clusters import CHOSEN, DrawnCluster, Trial, best_pairs, in_words, profile_in_rank

STEP_S, HOPELESS, CONTROLS = 1.0, 1.5, 2  # both passes, of the links alone; times the best price; that are measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    for name, default in {"clusters": 10, "seed": 0, "rounds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="of the result")
    parser.add_argument("--add", action="store_true", help="to the clusters that an earlier run has measured")


def run(options: argparse.Namespace) -> int:
    """Measure, print, save."""
    recording = Recording("auto", {"seed": options.seed, "rounds": options.rounds}, options.out)
    stopped = options.out.with_name(f"{options.out.name}.so-far")
    recording.rows += load(stopped if stopped.exists() else options.out).rows if options.add else []
    for number in range(len(recording.rows), options.clusters):
        (row,) = recording.measure(partial(measure, DrawnCluster.draw(options.seed, number), options.rounds))
        print(f"{row['ratio']:.3f} x the fastest, {row['fastest']}; {row['chosen']}", flush=True)
    print(f"within 5 % of the fastest: {sum(row['ratio'] <= 1.05 for row in recording.rows)} of {options.clusters}")
    recording.save()
    return 0


def measure(drawn: DrawnCluster, rounds: int) -> list[Row]:
    """Return the row of a cluster: what was chosen, and how it compares with the fastest."""
    with drawn.emulated() as cluster:
        trial = Trial.of(drawn, cluster.run(profile_in_rank, drawn.topology, timeout_s=240.0)[0], STEP_S)
        (tried, pruned), size = trial.tried(HOPELESS, CONTROLS), trial.shapes
        case = Case(drawn.nodes, drawn.ranks_per_node, size.q_len, *size[3:6], size.dtype, causal=False)
        able = {name: (Burst(name, strategy),) for name, strategy in tried.items()}
        found = cluster.run(measure_in_rank, case, able, Slept(*trial.visit_s.values()), rounds, timeout_s=900.0)[0]
    times = {name: {way: median(of) for way, of in found[name][1].items()} for name in tried}
    chosen_s, pairs = sum(times[CHOSEN].values()), best_pairs({x: times[name] for name, x in tried.items()})
    fastest, fastest_s = min(pairs.items(), key=lambda pair: pair[1])
    row = {**drawn._asdict(), "seq": case.seq, "links": vars(trial.links), "chosen": trial.said, "pruned": pruned}
    row |= {"time_s": chosen_s, "fastest": in_words(fastest), "fastest_s": fastest_s, "ratio": chosen_s / fastest_s}
    return [row | {"times_s": times, "prices_s": {in_words(x): price for x, price in trial.prices.items()}}]
