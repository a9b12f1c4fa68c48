"""Tables and pictures of results, from made-up rows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil", reason="psutil is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from benchmarks import RefusedError, report
from benchmarks.__main__ import main
from benchmarks.report import pictures, tables
from benchmarks.report.files import Result

ROOT = Path(__file__).parents[2]


def made_up(name: str, rows: list[dict[str, Any]], **changes: Any) -> Result:
    """A result of a benchmark that nobody ran."""
    machine = {"cpu": "Abacus", "cores": 2, "memory_bytes": 16 * 10**9, "os": "Linux 1.0"}
    fixed: dict[str, Any] = {
        "commit": "0123456789",
        "date": "2026-01-02 03:04 UTC",
        "machine": {**machine, "gpu": [], "gpu_driver": None},
        "versions": {"python": "3.11.0", "torch": "2.13.0", "yunchang": None},
        "load": {"before": 0.0, "after": 0.0, "others": 0.0, "stolen": 0.0},
        "busy": False,
        "settings": {},
    }
    return Result(benchmark=name, rows=rows, **{**fixed, **changes})


def cluster_row(contender: str, direction: str, time_s: float, **changes: Any) -> dict[str, Any]:
    case = {"nodes": 2, "ranks_per_node": 4, "rate_mbit": 100, "nic": "rank", "q_heads": 16, "kv_heads": 4}
    times = {"time_s": time_s, "time_s_min": time_s * 0.9, "time_s_max": time_s * 1.2, "bound_s": 0.24, "repeats": 3}
    return {**case, "compute": "slept", "contender": contender, "direction": direction, **times, **changes}


CLUSTER = [
    cluster_row("burst", "forward", 0.252),
    cluster_row("burst", "backward", 0.7, bound_s=0.56),
    cluster_row("flat", "forward", 0.6, bound_s=0.6),
    cluster_row("flat", "backward", 1.4, bound_s=0.6),
    *(
        {**cluster_row("Ulysses", way, 0), "time_s": None, "refused": "4 heads, 8 ranks"}
        for way in ("forward", "backward")
    ),
    {"contender": "USP", "absent": "yunchang is not installed"},
]
ATTENTION = [
    {"ranks": 2, "seq": seq, "q_heads": 8, "kv_heads": 8, "head_dim": 64, "dtype": "float32", "causal": True}
    | {"contender": contender, "both_s": both_s, "kernel_share": kernel_s / 2 / both_s}
    | {"flops_per_s": 1e14 if contender == "burst" else 5e12, "peak_bytes": 2e9 if contender == "burst" else None}
    for seq, kernel_s in ((8192, 1.0), (16384, 4.0))
    for contender, both_s in (("burst", kernel_s / 1.92), ("flat", kernel_s / 1.6))
]
TRAIN = [
    {"example": "Megatron", "ranks": 2, "context_parallel_size": size, "seq": 1024, "tokens_per_step": 2048}
    | {"tokens_per_s": 1234.5, "tokens_per_s_min": 1200, "tokens_per_s_max": 1300, "mfu": mfu}
    | {"peak_bytes": 5e8 / size}
    for size, mfu in ((1, 0.5), (2, None))
]
TRAIN[1] |= {"heads": 8, "kv_heads": 2}  # which older files do not have
TRAIN.append({"example": "DeepSpeed", "absent": "not installed: deepspeed"})


def test_figures_from_made_up_rows() -> None:
    (case,) = report.cases(made_up("cluster", CLUSTER), "compute")[0]
    assert case.directions() == ["forward", "backward"]
    assert (case.yardstick(), case.yardstick_s("backward")) == ("bound", 0.56)
    assert case.ratio("burst", "forward") == pytest.approx(1.05)
    assert case.ratio("flat", "backward") == pytest.approx(2.5)  # over the case's bound, not its own
    assert case.ratio("Ulysses", "forward") is None
    unbound = [{name: value for name, value in row.items() if name != "bound_s"} for row in CLUSTER]
    (case,) = report.cases(made_up("cluster", unbound), "compute")[0]
    assert (case.yardstick(), case.yardstick_s("backward"), case.ratio("flat", "backward")) == ("burst", 0.7, 2.0)
    assert report.contenders([case]) == ["burst", "flat", "Ulysses"]
    assert report.absent(CLUSTER) == {"USP": "yunchang is not installed"}
    assert case.refusal("Ulysses") == "4 heads, 8 ranks"
    assert (case.topology, case.rate, case.heads) == ("2×4", "100 mbit", "16/4")


# ------------------------------------------------------------------------------------------------------------- table


def test_tables_have_every_figure_with_its_machine_and_commit(tmp_path: Path) -> None:
    every = [made_up("train", TRAIN), made_up("attention", ATTENTION), made_up("cluster", CLUSTER)]
    text = tables.tables({Path(f"{result.benchmark}.json"): result for result in every}, tmp_path)
    lines = text.splitlines()
    assert "| 2×4 | 100 mbit | 16/4 | 240 / 560 | 1.05 / 1.25 | 2.50 / 2.50 | refused |" in lines
    assert "- absent, not measured: USP (yunchang is not installed)" in lines
    assert "- refused by Ulysses: 2×4, 16/4 heads (4 heads, 8 ranks)" in lines
    assert "| 16,384 | 8/8 | 2,083 ms, 96% | 2,500 ms, 80% |" in lines
    assert "| 16,384 | 8/8 | 100 TFLOP/s, 2,000 MB | 5,000 GFLOP/s |" in lines
    assert "| Megatron | – | 2 | 1 | 1,024 | 2,048 | 1,234 | 50.0% | 500 MB |" in lines
    assert "| Megatron | 8/2 | 2 | 2 | 1,024 | 2,048 | 1,234 | – | 250 MB |" in lines
    where = "Abacus, 2 cores, 16 GB, Linux 1.0; commit 0123456789; 2026-01-02 03:04 UTC; python 3.11.0, torch 2.13.0"
    assert "- absent, not measured: DeepSpeed (not installed: deepspeed)" in lines
    assert lines.count(f"<sub>{where}</sub>") == 3
    assert text.index("Emulated cluster") < text.index("Attention,") < text.index("Training:")
    widths = [line.count(" | ") for line in lines if line.startswith("|")]
    assert set(widths) == {6, 3, 8}


def test_packed_documents_have_a_table_of_their_own(tmp_path: Path) -> None:
    """Of both passes, the others over this project, and one that refuses them beneath."""
    rows = [
        *(
            cluster_row(name, way, time_s, sigma=sigma, documents=9, **({} if name == "burst" else {"bound_s": None}))
            for name, sigma, times in (
                ("burst", 0.5, (0.1, 0.2, 0.3)),
                ("burst", 1.0, (0.1, 0.4, 0.5)),
                ("zigzag by document", 0.5, (0.3, 0.9, 1.2)),
            )
            for way, time_s in zip(("forward", "backward", "both"), times, strict=True)
        ),
        {"contender": "USP", **cluster_row("USP", "both", 0), "time_s": None, "refused": "whole ones", "sigma": 0.5},
    ]
    found = {Path("one.json"): made_up("cluster", rows)}
    lines = tables.tables(found, tmp_path).splitlines()
    assert "| nodes×ranks | link | lengths | burst, ms | burst / bound | zigzag by document |" in lines
    assert "| 2×4 | 100 mbit | σ 0.5 | 300 | 1.25 | 4.00 |" in lines
    assert "| 2×4 | 100 mbit | σ 1 | 500 | 2.08 | – |" in lines
    assert "- refused by USP: 2×4 (whole ones)" in lines
    text = tables.summary(found)
    assert "time of burst over the bound, both passes; time of the others over that of burst" in text
    assert "| 100 mbit | 1.25 to 2.08 (1.67) | 4.00, 1 refused | refused |" in text.splitlines()
    figure = pictures.draw_cluster(found[Path("one.json")])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["both\nσ 0.5", "both\nσ 1"]
    pictures.plt.close(figure)


@pytest.mark.parametrize("dilation", [None, 1.0, 4.0])
def test_a_table_says_how_much_slower_links_and_computing_were(tmp_path: Path, dilation: float | None) -> None:
    """Older files do not have it."""
    known = {} if dilation is None else {"dilation": dilation}
    rows = [cluster_row("burst", way, 0.3, sigma=0.5, **known) for way in ("forward", "backward", "both")]
    found = {Path("one.json"): made_up("cluster", rows)}
    found[Path("one.json")].settings.update(compute="slept", visit_ms=[30, 75])
    for text in (tables.tables(found, tmp_path), tables.summary(found)):
        assert "All queries of one rank on all keys of another take 30 and 75 ms." in text
        assert ("were 4 times slower, and times are divided by that" in text) == (dilation == 4.0)
        assert ("a NIC per rank, a core per rank, compute slept" in text) == (dilation == 4.0)


def test_a_summary_has_ranges_and_medians_over_all_settings() -> None:
    more = [
        *(cluster_row("burst", way, 0.3, nodes=4, bound_s=0.25) for way in ("forward", "backward")),
        *(cluster_row("flat", way, 0.45, nodes=4, bound_s=0.25) for way in ("forward", "backward")),
        *(cluster_row("Ulysses", way, 0.36, nodes=4, bound_s=0.25) for way in ("forward", "backward")),
        *(cluster_row("burst", way, 0.4, rate_mbit=None, bound_s=0.25) for way in ("forward", "backward")),
    ]
    every = [made_up("train", TRAIN), made_up("attention", ATTENTION), made_up("cluster", [*CLUSTER, *more])]
    lines = tables.summary({Path(f"{result.benchmark}.json"): result for result in every}).splitlines()
    assert lines[0].startswith("Emulated cluster (2×4, 4×4 nodes×ranks; 16/4 heads; a NIC per rank, compute slept): ")
    assert "| link | burst / bound | flat | Ulysses |" in lines
    assert "| 100 mbit | 1.05 to 1.25 (1.20) | 1.50 to 2.10 (1.80) | 1.20, 1 refused |" in lines
    assert "| no limit | 1.60 | refused | refused |" in lines
    assert "| 2 ranks | float32 | 8,192 to 16,384 | 96% | 80% |" in lines
    assert lines.count("<sub>Abacus, 2 cores, 16 GB, Linux 1.0; commit 0123456789; 2026-01-02 03:04 UTC</sub>") == 2
    BUSY = {"others": 0.3, "stolen": 0.0}
    unbound = [{name: value for name, value in row.items() if name != "bound_s"} for row in CLUSTER]
    assert (
        "| 100 mbit | 2.10 | refused |"
        in tables.summary({Path("one.json"): made_up("cluster", unbound)}).splitlines()
    )
    assert "**Measured on a busy" in tables.summary({Path("a"): made_up("cluster", CLUSTER, busy=True, load=BUSY)})
    assert tables.summary({}) == "Nothing has been measured yet."


def test_a_table_of_a_busy_machine_says_so() -> None:
    busy = made_up("train", TRAIN, busy=True, load={"others": 0.31, "stolen": 0.0})
    said = "measured on a busy machine: 31% of its CPUs' time went to other programs, 0% to other virtual machines"
    assert f"**{said.capitalize()}.**".replace("cpus", "CPUs") in tables.tables({Path("one.json"): busy}, ROOT)
    assert tables.tables({}, ROOT) == "Nothing has been measured yet."


def test_the_page_is_written_between_its_markers_and_checked(tmp_path: Path) -> None:
    page, found = tmp_path / "benchmarks" / "results" / "README.md", {Path("one.json"): made_up("train", TRAIN)}
    for folder in (page.parent, tmp_path / "docs"):
        folder.mkdir(parents=True)
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    write, check = (partial(tables.update, found, page, check=check) for check in (False, True))
    assert check() == 1
    assert "old" in page.read_text()
    assert write() == 0
    summary = "## Summary\n\nNothing has been measured yet.\n\n## Every result\n\n"
    text = page.read_text()
    assert text.startswith(f"before\n{tables.BEGIN}\n{summary}Training:")
    assert text.endswith(f"</sub>\n{tables.END}\nafter\n")
    assert check() == 0
    (tmp_path / "docs" / "one.png").touch()
    assert check() == 1
    assert write() == 0
    picture = "![train on Abacus](../../docs/one.png)"
    assert page.read_text().startswith(f"before\n{tables.BEGIN}\n{summary}{picture}\n\nTraining:")
    right = page.read_text()
    for old, new in (("Nothing", "Something"), ("1,234", "1,235")):
        page.write_text(right.replace(old, new))
        assert check() == 1
    for wrong in (
        "no markers",
        f"{tables.END} {tables.BEGIN}",
        f"{tables.BEGIN} {tables.BEGIN} {tables.END}",
        f"{tables.END} {tables.BEGIN} {tables.END}",
    ):
        page.write_text(wrong)
        with pytest.raises(RefusedError, match=r"README.md has to have"):
            write()


def test_the_page_of_this_repository_is_up_to_date() -> None:
    assert main(["table", "--check"]) == 0


# -------------------------------------------------------------------------------------------------------------- draw


def test_files_become_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in (("cluster", CLUSTER), ("attention", ATTENTION)):
        (tmp_path / f"{name}.json").write_text(json.dumps(vars(made_up(name, rows))))
    assert main(["draw", *map(str, sorted(tmp_path.glob("*.json"))), "--out", str(tmp_path / "docs")]) == 0
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "docs").iterdir()}
    assert sorted(sizes) == ["attention.png", "cluster.png"]
    assert all(5_000 < size < 200_000 for size in sizes.values())
    assert capsys.readouterr().out.count("Picture: ") == 2


def test_bars_are_as_high_as_the_ratios_and_absent_contenders_have_none() -> None:
    figure = pictures.draw_cluster(made_up("cluster", CLUSTER))
    (axis,) = figure.axes
    heights = [bar.get_height() for container in axis.containers for bar in container]
    assert heights == pytest.approx([1.05, 2.5, 1.25, 2.5])
    assert [text.get_text() for text in axis.texts] == [" 1.05", "×", " 1.25", "×"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["burst", "flat", "Ulysses"]
    words = [text.get_text() for text in figure.texts]
    assert any("absent: USP (yunchang is not installed)" in word for word in words)
    assert any("commit 0123456789" in word for word in words)
    pictures.plt.close(figure)


def test_no_panel_cuts_off_a_bar_of_another_size() -> None:
    slower = [
        {**row, "rate_mbit": 400, "time_s": 3 * row["time_s"], "time_s_max": 3 * row["time_s"]}
        for row in CLUSTER
        if row.get("time_s")
    ]
    figure = pictures.draw_cluster(made_up("cluster", [*CLUSTER, *slower]))
    first, second = figure.axes
    assert second.dataLim.ymax > 2 * first.dataLim.ymax
    for axis in figure.axes:
        assert axis.get_ylim()[0] == 0
        assert axis.get_ylim()[1] >= second.dataLim.ymax
    pictures.plt.close(figure)


def test_files_that_cannot_be_drawn_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    for text, said in (
        ("{", "cannot be read"),
        ('{"rows": []}', "is not a result of a benchmark"),
        (json.dumps(vars(made_up("cluster", []))), "has no case that was measured"),
        (json.dumps(vars(made_up("knitting", []))), "is of 'knitting'; there are pictures of"),
    ):
        wrong.write_text(text)
        assert main(["draw", str(wrong), "--out", str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    assert list(tmp_path.glob("*.png")) == []
