"""Many settings measured one after the other: what takes an hour may be interrupted, and disturbed by others.

    campaign = Campaign.begin("cluster", options, free=("rates",))
    for setting in ...:
        campaign.measure(setting.is_of, lambda: rows_of(setting), show)
    campaign.end()

What is measured is in FILE.so-far at once, and in FILE at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.limits import RefusedError
from tests.support.ranks import RankError

__all__ = ["Campaign", "Row", "add_campaign_arguments"]

_OPTIONS = ("out", "resume", "patience", "no_save")  # say nothing of what is measured
Row = dict[str, Any]


def add_campaign_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of all commands that measure this way."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="of the result; by default one in benchmarks/results. Until a run ends, what it has is in FILE.so-far",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="after an interruption: measure what FILE.so-far does not have, or has from when the machine was busy",
    )
    parser.add_argument(
        "--patience",
        type=int,
        default=0,
        metavar="N",
        help="how often to measure a setting again if the machine was busy meanwhile; the quietest counts",
    )
    parser.add_argument("--no-save", action="store_true", help="only print")


@dataclass
class Campaign:
    """A run of a benchmark. `rows` are those of all settings so far, each with its `commit` and `load`."""

    benchmark: str
    settings: Mapping[str, Any]
    out: Path | None  # where to save; nowhere if None
    patience: int
    rows: list[Row]
    on_gpu: bool = False

    @classmethod
    def begin(
        cls,
        benchmark: str,
        options: argparse.Namespace,
        *,
        variant: str | None = None,
        on_gpu: bool = False,
        free: Sequence[str] = (),
    ) -> Campaign:
        """Begin, or go on where a run ended that was asked for the same.

        Args:
            options: of the command, those of `add_campaign_arguments` among them; the others are saved as settings.
            variant: what names the file if `--out` does not; the benchmark's name if None.
            on_gpu: whether GPUs compute.
            free: options in which the run that is gone on with may differ: its rows say what they are of.

        Raises:
            RefusedError: if FILE.so-far is of other settings, or for `--resume` with `--no-save`.
        """
        if options.resume and options.no_save:
            raise RefusedError("--resume goes on with what was saved; leave --no-save out")
        settings = {name: value for name, value in vars(options).items() if name not in _OPTIONS}
        out = None if options.no_save else options.out or results.default_path(variant or benchmark, on_gpu)
        campaign = cls(benchmark, settings, out, options.patience, [], on_gpu)
        if options.resume and campaign.so_far.exists():
            campaign.rows = _rows_of(campaign.so_far, settings, free)
        return campaign

    @property
    def so_far(self) -> Path:
        """The file of what is measured, until the run ends."""
        assert self.out is not None
        return self.out.with_name(f"{self.out.name}.so-far")

    def measure(
        self, is_of: Callable[[Row], bool], measure: Callable[[], list[Row]], show: Callable[[list[Row]], None]
    ) -> None:
        """Measure one setting, unless there are rows of it from a quiet machine, until it is quiet or patience ends.

        `is_of` knows the rows of this setting; `show` is given those of every attempt.
        """
        kept = [row for row in self.rows if is_of(row)]
        for _ in range(1 + self.patience):
            if kept and not worst_load(kept).busy:
                break
            with results.Watch() as watch:
                measured = self._interruptible(measure)
            when = {"commit": results.commit(), "load": asdict(watch.load)}
            found = [{**row, **when} for row in measured]
            show(found)
            kept = min(([kept] if kept else []) + [found], key=lambda each: worst_load(each).taken)
            self.rows = [row for row in self.rows if not is_of(row)] + kept
            self._save(self.out and self.so_far, quiet=True)

    def _interruptible(self, measure: Callable[[], list[Row]]) -> list[Row]:
        try:
            return measure()
        except (KeyboardInterrupt, RankError):
            if self.out and self.rows:
                print(f"bench: {self.so_far} has what is measured so far; --resume goes on with it", file=sys.stderr)
            raise

    def end(self) -> None:
        """Save the whole, and say where."""
        self._save(self.out)
        if self.out:
            self.so_far.unlink(missing_ok=True)

    def _save(self, path: Path | None, quiet: bool = False) -> None:
        if path:
            load = worst_load(self.rows)
            results.save(self.benchmark, self.settings, self.rows, load, path, quiet=quiet, on_gpu=self.on_gpu)


def worst_load(rows: Sequence[Row]) -> results.Load:
    """The load of the setting that was measured under the heaviest."""
    return max((results.Load(**row["load"]) for row in rows), key=lambda load: load.taken)


def _rows_of(path: Path, settings: Mapping[str, Any], free: Sequence[str]) -> list[Row]:
    before = results.load(path)
    asked = json.loads(json.dumps(dict(settings)))
    unlike = [name for name, value in asked.items() if name not in free and before.settings.get(name) != value]
    if unlike or any("load" not in row for row in before.rows):
        raise RefusedError(
            f"--resume: {path} is of other options ({', '.join(unlike)}), or of an earlier version that did not have "
            "them; use the same, or remove it"
        )
    return before.rows
