"""The quickstart: train with burst attention on several ranks, then on one rank, and compare. See --help."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
from typing import Any

from quickstart_launch import RunError, launch
from quickstart_report import report
from quickstart_settings import Settings, parse
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def main() -> int:
    settings = parse()
    console = Console(highlight=False)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the ranks are ended too
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores one
            signal.signal(number, signal.default_int_handler)
    try:
        settings, where = choose_device(settings)
        clear(settings)
        title = "[bold]burst_plugin quickstart[/bold]"
        console.print(f"{title}: {settings.model} of {settings.layers} layers on {where}", soft_wrap=True)
        train_all(settings, console)
        return report(settings, console)
    except RunError as failure:
        console.print(f"[bold red]The quickstart failed.[/bold red] {escape(str(failure))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; all ranks have been ended.")
        return 130


def choose_device(settings: Settings) -> tuple[Settings, str]:
    """GPUs if every rank can have one; and the same in words."""
    gpus = 0
    if settings.device != "cpu":
        import torch  # takes a moment, so not for --help

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # counted without a driver that fits
    if settings.device == "cuda" and gpus < settings.ranks:
        raise RunError(
            f"--device cuda: got {gpus} GPUs for {settings.ranks} ranks, expected one for each: "
            "lower --ranks, or take --device cpu."
        )
    device = "cuda" if gpus >= settings.ranks else "cpu"
    ranks = f"{settings.ranks} ranks as {settings.nodes} x {settings.ranks_per_node}"
    where = f"{settings.ranks} GPUs with NCCL" if device == "cuda" else "the CPU with gloo"
    return dataclasses.replace(settings, device=device), f"{where}, {ranks} (nodes x ranks per node)"


def clear(settings: Settings) -> None:
    """An output directory without the results of an earlier run, which git does not see."""
    directory = settings.directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ".gitignore").write_text("*\n")
    for old in (*directory.glob("burst-*.json*"), *directory.glob("reference-*.json*")):
        old.unlink()
    for folder in ("logs", "data"):
        shutil.rmtree(directory / folder, ignore_errors=True)
        (directory / folder).mkdir()
    settings.save(directory / "settings.json")


def train_all(settings: Settings, console: Console) -> None:
    """Both runs, one after the other, each with its bar."""
    runs = [("burst", settings.ranks, f"{settings.ranks} ranks, burst attention")]
    if settings.reference:
        runs.append(("reference", 1, "1 rank, Megatron's own"))
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=False) as progress:
        for name, ranks, words in runs:
            task = progress.add_task(words, total=settings.steps, news="starting")

            def on_news(news: dict[str, Any], task: Any = task, words: str = words) -> None:
                if "data" in news:
                    console.print(f"Text: {news['data']}.", soft_wrap=True)
                    return
                speed = settings.seq_length / news["step_s"]
                text = f"loss {news['loss']:.4f}  {speed:,.0f} tokens/s"
                progress.update(task, completed=news["step"], news=text)
                if not console.is_terminal:
                    console.print(f"{words}: step {news['step']}/{settings.steps}, {text}", soft_wrap=True)

            launch(settings, name, ranks, on_news)


if __name__ == "__main__":
    sys.exit(main())
