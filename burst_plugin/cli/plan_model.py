"""`burst plan --model`: the fastest way to train a model on long sequences that fits; its memory and its time."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from burst_plugin.cli.plan_report import as_dict, gpus_in_words, report
from burst_plugin.cli.values import StatusLine, number, tokens, whole, write_json
from burst_plugin.frameworks import FRAMEWORKS, framework
from burst_plugin.planning.cluster import Cluster
from burst_plugin.profiling.cluster_profile import ClusterProfile
from burst_plugin.training.measured_rates import measured_rates
from burst_plugin.training.memory import GIB
from burst_plugin.training.model_shape import MODELS, ModelShape, model_shape
from burst_plugin.training.tower_families import Media, tower_of
from burst_plugin.training.training_plan import (
    Candidate,
    Goal,
    longest,
    nearest,
    plans_that_fit,
    settings,
    some_plan_fits,
)

_DESCRIPTION = """\
Plan the training of a model on sequences of some length: how it is cut over
GPUs, what is kept, computed again, cut into chunks or moved to the host; the
fastest of all ways that fit, with memory and time part by part. Nothing is run
and no GPU is needed.
"""
_USAGE = "burst plan MODEL (--seq TOKENS | --max-tokens | --flags FILE) [--gpus N] [option ...]"
_EXAMPLE = """\
examples:
  burst plan llama3_8b --seq 1m --gpus 8 --gpu-gib 80
  burst plan path/to/config.json --seq 256k --gpus 32 --emit plan/
  burst plan qwen3_8b --max-tokens --gpus 8
  burst plan qwen3-vl.json --seq 128k --images 32 --image-tokens 1024

what one attention layer takes with each schedule, without a model:
  burst plan --profile burst-profile.json   where burst check has measured
  burst plan --nodes 2 --help               on a cluster that you describe
"""
_MOST = 2**17  # GPUs, or sequences
_MORE_NODES = 64  # where nothing fits, up to this many times the nodes are tried

# By field of `Cluster`: the unit of the option, that unit in units of the field, and a description.
_RATES = {
    "gpu_gib": ("GiB", 1.0, "memory of a GPU"),
    "host_gib": ("GiB", 1.0, "memory of a node"),
    "margin_gib": ("GiB", 1.0, "of a GPU's memory to leave for CUDA, NCCL and fragmentation"),
    "peak_flops": ("TFLOPS", 1e12, "peak of a GPU, dense, in bf16"),
    "matmul_share": ("SHARE", 1.0, "share of the peak that linear layers reach"),
    "attention_share": ("SHARE", 1.0, "share of the peak that attention kernels reach"),
    "recurrent_share": ("SHARE", 1.0, "share of the peak that kernels of layers with a state reach"),
    "intra_bytes_per_s": ("GB/S", 1e9, "rate between two GPUs of a node, in one direction"),
    "inter_bytes_per_s": ("GB/S", 1e9, "rate of a GPU's NIC to other nodes, in one direction"),
    "pcie_bytes_per_s": ("GB/S", 1e9, "rate between a GPU and its host, in one direction, all GPUs at once"),
    "host_bytes_per_s": ("GB/S", 1e9, "rate of a node's memory"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `burst plan --model` to its parser."""
    parser.description, parser.epilog, parser.usage = _DESCRIPTION, _EXAMPLE, _USAGE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--model",
        metavar="NAME",
        required=True,
        help=f"{', '.join(MODELS)}, or the path of a config.json; the word --model may be left out",
    )
    goals = parser.add_mutually_exclusive_group(required=True)
    goals.add_argument("--seq", metavar="TOKENS", type=tokens, help="length of a sequence, such as 131072 or 1m")
    goals.add_argument("--max-tokens", action="store_true", help="find the longest sequence that fits")
    goals.add_argument(
        "--flags",
        metavar="FILE",
        type=Path,
        help="a command line or flags in a file, - for standard input: say what they take, without a search",
    )
    parser.add_argument(
        "--gpus", metavar="N", type=whole("GPUs", _MOST), default=8, help="GPUs of all nodes (default: 8)"
    )
    parser.add_argument("--gpus-per-node", metavar="N", type=whole("GPUs", _MOST), default=8, help="(default: 8)")
    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        help=f"(default: {FRAMEWORKS[0]}; with images, the first whose ranks share their tower)",
    )
    parser.add_argument(
        "--batch", metavar="N", type=whole("sequences", _MOST), help="sequences per step (default: 1)"
    )
    _add_media_arguments(parser)
    parser.add_argument(
        "--fused-norms",
        action="store_true",
        help="norms are one kernel each, as with Liger; else those of models written in single operations keep "
        "float32 copies, unless MLPs and norms run in chunks",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="what burst check has measured: the rates of links and kernels, in place of the defaults below",
    )
    parser.add_argument("--emit", metavar="FOLDER", type=Path, help="write what the framework is started with there")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the plan as JSON there, too")
    _add_rates(parser)


def _add_rates(parser: argparse.ArgumentParser) -> None:
    defaults = {field.name: field.default for field in fields(Cluster)}
    for name, (unit, size, text) in _RATES.items():
        default = float(str(defaults[name])) / size
        parser.add_argument(
            _flag(name),
            dest=name,
            metavar=unit,
            type=number("a positive number", 1e-6),
            help=f"{text} (default: {default:g})",
        )


def _add_media_arguments(parser: argparse.ArgumentParser) -> None:
    media = parser.add_argument_group("images and video", "of a model with a tower; without them, its text alone")
    count = whole("images", _MOST)
    media.add_argument("--images", metavar="N", type=count, help="images in each sequence")
    media.add_argument("--frames", metavar="N", type=whole("frames", _MOST), help="frames of video in each sequence")
    media.add_argument(
        "--image-tokens",
        metavar="N",
        type=whole("tokens", _MOST),
        help="tokens of an image, or of frames encoded at once; models that fix these take larger images as tiles",
    )
    media.add_argument("--frozen-tower", action="store_true", help="the tower and its projector are not trained")


def _flag(name: str) -> str:
    return "--" + name.replace("bytes_per_s", "gb_s").replace("peak_flops", "tflops").replace("_", "-")


def lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines that `burst plan --model` prints: the fastest plan that fits, or what given flags take.

    options: the parsed options of `add_arguments`. With `--emit` and `--json`, files are written as well. Raises
    ValueError if nothing fits, no plan can honour an option, or a file cannot be read or written.
    """
    if options.framework is None:
        options.framework = _sharing_towers()[0] if options.images or options.frames else FRAMEWORKS[0]
    goal = _goal(options)
    problem = _inexpressible(options.framework, goal.model)
    if options.emit is not None and problem is not None:
        raise ValueError(f"--emit {options.emit}: {problem}; nothing was written, drop --emit to see the plan")
    if options.flags is not None:
        yield from _given(options, goal)
        return
    status = StatusLine()
    if not options.max_tokens:
        _check_places(goal)
    else:
        goal = replace(goal, tokens=_longest(goal, status))
        if not goal.tokens:
            raise ValueError(_nothing_fits(replace(goal, tokens=2**16)))
        _check_places(goal)
        yield f"The longest sequence that fits, to 65,536: {goal.tokens:,} tokens ({goal.tokens / 2**20:.2f}m)."
        yield ""
    best_first = plans_that_fit(goal, status.progress)
    if not best_first:
        raise ValueError(_nothing_fits(goal))
    # Before anything is printed: whoever reads that may stop after a few lines.
    written = [] if options.emit is None else ["", _written(options, goal, best_first[0].setting)]
    if options.json is not None:
        write_json(options.json, as_dict(goal, options.framework, best_first))
    yield from report(goal, options.framework, best_first)
    if problem is not None:
        yield from ("", f"`--emit` cannot write this plan: {problem}.")
    yield from written


def _inexpressible(name: str, model: ModelShape) -> ValueError | None:
    """Return the error that says what of a model the files of a framework cannot say, None if they can say all."""
    check = getattr(framework(name).planning(), "check_expressible", None)
    try:
        if check is not None:
            check(model)
    except ValueError as error:
        return error
    return None


def _given(options: argparse.Namespace, goal: Goal) -> Iterator[str]:
    """Yield the memory and time of a run whose flags are given (`--flags`)."""
    planning = framework(options.framework).planning()
    if not hasattr(planning, "setting_of"):
        raise ValueError(f"--flags: command lines of {options.framework} cannot be read; use --seq")
    for name in ("batch", "emit"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} does not go with --flags, which describes the whole run; leave it out")
    try:
        text = sys.stdin.read() if str(options.flags) == "-" else options.flags.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"--flags {options.flags} cannot be read: {reason}; give a file with flags, or - for standard input"
        ) from error
    try:
        setting = planning.setting_of(text, goal.cluster.gpus, goal.cluster.gpus_per_node)
        planning.check_model(text, goal.model, setting)
    except ValueError as error:
        raise ValueError(f"--flags {options.flags}: {error}") from error
    goal = replace(goal, tokens=setting.tokens, batch=setting.batch)
    candidates = [Candidate.of(goal, setting)]
    if options.json is not None:
        write_json(options.json, as_dict(goal, options.framework, candidates))
    first, *others = report(goal, options.framework, candidates, is_given=True)
    yield first
    yield from planning.unpriced(text, setting)
    yield from others


def _goal(options: argparse.Namespace) -> Goal:
    per_node = min(options.gpus_per_node, options.gpus)
    if options.gpus % per_node:
        raise ValueError(
            f"--gpus {options.gpus} is not a number of whole nodes of --gpus-per-node {per_node}; use a multiple"
        )
    model = _with_media(options, model_shape(options.model))
    cluster = Cluster(nodes=options.gpus // per_node, gpus_per_node=per_node, **_rates(options, model))
    space = framework(options.framework).planning().space(options.fused_norms)
    return Goal(
        model=model,
        tokens=options.seq or 0,
        cluster=cluster,
        space=space,
        batch=options.batch or 1,
    )


def _with_media(options: argparse.Namespace, model: ModelShape) -> ModelShape:
    """Return a model with the images that each sequence has, if any. Raise ValueError for what does not fit it."""
    if not options.images and not options.frames:
        for name in ("image_tokens", "frozen_tower"):
            if getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')} has no effect without --images or --frames; add one")
        return model
    option = "--images" if options.images else "--frames"
    if options.framework not in _sharing_towers():
        raise ValueError(
            f"{option}: plans for {options.framework} cannot count towers of images; use --framework "
            f"{' or '.join(_sharing_towers())}, or plan text alone"
        )
    try:
        tower = tower_of(model.config, model.hidden)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if options.frames and not tower.frames:
        raise ValueError(f"--frames: {model.config['model_type']} takes no video; give frames as --images")
    rows = tower.tokens or options.image_tokens
    if rows is None:
        raise ValueError(f"{option}: images of {model.config['model_type']} have any size; add --image-tokens")
    tiles = -(-(options.image_tokens or rows) // rows)
    units = (options.images or 0) * tiles + -(-(options.frames or 0) // max(1, tower.frames))
    media = Media(tower=tower, units=units, rows=rows, frozen=options.frozen_tower)
    return replace(model, name=str(model.config["model_type"]), media=media)


def _sharing_towers() -> list[str]:
    """Return the frameworks whose ranks share towers, as far as plans know."""
    return [name for name in FRAMEWORKS if framework(name).planning().space(False).media]


def _check_places(goal: Goal) -> None:
    """Raise ValueError if sequences have fewer tokens than their images take."""
    media = goal.model.media
    if media is not None and media.tokens > goal.tokens:
        raise ValueError(
            f"{media.units} images of {media.rows:,} tokens each take {media.tokens:,} tokens, and a sequence has "
            f"{goal.tokens:,}; use a longer one, or fewer images"
        )


def _rates(options: argparse.Namespace, model: ModelShape) -> dict[str, float]:
    """Return the rates of `Cluster` that are given, or were measured."""
    values = {name: getattr(options, name) for name in _RATES}
    rates = {name: value * _RATES[name][1] for name, value in values.items() if value is not None}
    if options.profile is None:
        return rates
    profile = ClusterProfile.read(options.profile)
    return measured_rates(profile, model, rates.get("peak_flops", Cluster.peak_flops)) | rates


def _longest(goal: Goal, status: StatusLine) -> int:
    """Return the most tokens that fit, and say meanwhile which number is tried."""
    most = longest(goal, lambda tokens_tried: status.show(f"trying {tokens_tried:,} tokens"))
    status.erase()
    return most


def _nothing_fits(goal: Goal) -> str:
    """Return a text on the memory that the nearest plans lack and on sizes that fit; announce a long search."""
    cluster, status = goal.cluster, StatusLine()
    size = gpus_in_words(cluster.gpus)
    if next(settings(goal), None) is None:
        return f"{goal.tokens:,} tokens cannot be cut over {size}; use a multiple of {2 * cluster.gpus}"
    print(f"burst plan: nothing fits on {size}; looking for what would, which may take a minute", file=sys.stderr)
    lacks, ways = [], []
    for needed in nearest(goal):
        gpu, host = needed.gpu_bytes / GIB, needed.host_bytes / GIB
        lacking, sizes = [], []
        if gpu > cluster.gpu_gib:
            lacking.append(f"a GPU needs {gpu:.1f} GiB of {cluster.gpu_gib:g}")
            sizes.append(f"GPUs of {gpu + 0.1:.1f} GiB")
        if host > cluster.host_gib:
            lacking.append(f"a host needs {host:.0f} GiB of {cluster.host_gib:g}")
            sizes.append(f"hosts of {host + 1:.0f} GiB")
        lacks.append(" and ".join(lacking))
        ways.append(" and ".join(sizes))
    most = _longest(goal, status)
    ways += [f"sequences of {most:,} tokens"] if most else []
    times = 2
    while times <= _MORE_NODES:
        more = replace(goal, cluster=replace(cluster, nodes=times * cluster.nodes))
        status.show(f"trying {gpus_in_words(more.cluster.gpus)}")
        if some_plan_fits(more):
            ways.append(gpus_in_words(more.cluster.gpus))
            break
        times *= 2
    status.erase()
    return (
        f"{goal.model.name} on {goal.tokens:,} tokens does not fit on {size}: with the nearest plan "
        f"{', or with another '.join(lacks)}; what would fit: {', or '.join(ways)}"
    )


def _written(options: argparse.Namespace, goal: Goal, setting: object) -> str:
    planning = framework(options.framework).planning()
    try:
        options.emit.mkdir(parents=True, exist_ok=True)
        for name, text in planning.files(goal.model, setting).items():
            (options.emit / name).write_text(text)
    except OSError as error:
        raise ValueError(f"--emit {options.emit} cannot be written to: {error}; give a folder") from error
    names, usage = ", ".join(planning.files(goal.model, setting)), planning.usage(options.emit, setting)
    return f"Written to {options.emit}: {names}. {usage}"
