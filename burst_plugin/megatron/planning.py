"""Plans for Megatron: what its code keeps, how a plan is written as flags, and how a command line is read as a plan.

A command line is read as Megatron's own parser reads it: `--flag value` or `--flag=value`, never shortened; the last
of a repeated flag counts. Everything else on the line is passed over: the launcher, the script, and flags that
cost neither memory nor time.
"""

from __future__ import annotations

import argparse
import ast
import math
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from burst_plugin.megatron.flags.arguments import add_arguments, flag_of, strategy_of
from burst_plugin.megatron.flags.model_flags import model_flags
from burst_plugin.megatron.releases import target_version
from burst_plugin.schedule.rings import default_schedule_name
from burst_plugin.strategy import AUTO, Strategy
from burst_plugin.topology import Topology
from burst_plugin.training.model_shape import ModelShape
from burst_plugin.training.setting import RECOMPUTE, Code, Setting, latents_sent, strategy_options
from burst_plugin.training.training_plan import Space
from burst_plugin.types import DIRECTIONS

_FILE = "megatron_flags.txt"
_RECOMPUTE = {
    "none": "",
    "mlp": "--recompute-granularity selective --recompute-modules {mlp}",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


def space(fused_norms: bool) -> Space:
    """Return the `Space` of plans for Megatron: which parallelism it has, and what its layers keep in memory.

    The layers are Transformer Engine's. fused_norms: without effect here, since their norms and activations are one
    kernel each in any case.
    """
    code = Code(plain_norms=False, mlp_kept=3, logit_bytes=10, sums_weights=False, chunks_again=True)
    return Space(code=code, zeros=(1,), tensor=True, pipeline=True, recompute=RECOMPUTE, divides=True)


def check_expressible(model: ModelShape) -> None:
    """Raise ValueError if Megatron has no flags for something that `model` computes.

    The release is that of a Megatron-LM checkout in the current directory, else of the installed megatron-core, else
    the oldest that was tested.
    """
    model_flags(model, 1, target_version())


def files(model: ModelShape, setting: Setting) -> Mapping[str, str]:
    """Return the text of a plan's files by name: one file of Megatron's flags for a model and a setting, as lines.

    It leaves out flags for data, tokenizer, learning rate and checkpoints. Raises ValueError for a model that
    Megatron has no flags for.
    """
    lines = [
        *model_flags(model, setting.tensor, target_version()),
        f"--seq-length {setting.tokens} --max-position-embeddings {setting.tokens}",
        f"--micro-batch-size {setting.micro_batch} --global-batch-size {setting.batch}",
        _parallel_sizes(setting),
        _RECOMPUTE[setting.recompute].format(mlp="moe" if model.experts else "mlp"),
        "--bf16 --transformer-impl transformer_engine --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather --hidden-dropout 0 --no-create-attention-mask-in-dataloader",
        "--cp-comm-type burst --burst-memory off",  # all is chosen here
        *(flag_of(f"burst_{name}", value) for name, value in strategy_options(model, setting).items()),
    ]
    if setting.offload_optimizer:
        lines.append(
            "--optimizer-cpu-offload --optimizer-offload-fraction 1.0 --use-precision-aware-optimizer "
            "--overlap-cpu-optimizer-d2h-h2d"
        )
    return {_FILE: "".join(f"{line}\n" for line in lines if line)}


def usage(folder: str, setting: Setting) -> str:
    """Return the command that trains with a plan's file of flags, and the release of Megatron that these are for.

    folder: where the file is. setting: without effect here.
    """
    version = ".".join(map(str, target_version()))
    command = "python -m burst_plugin.run --framework megatron pretrain_gpt.py"
    return f"{command} $(cat {folder}/{_FILE}) ... (Megatron {version})"


def _parallel_sizes(setting: Setting) -> str:
    sizes = [f"--context-parallel-size {setting.context}"]
    if setting.tensor > 1:
        sizes.append(f"--tensor-model-parallel-size {setting.tensor} --sequence-parallel")
    if setting.pipeline > 1:
        sizes.append(f"--pipeline-model-parallel-size {setting.pipeline}")
    if 1 < setting.inner < setting.context:  # ranks in a node, then nodes
        sizes.append(f"--hierarchical-context-parallel-sizes {setting.inner} {setting.context // setting.inner}")
    return " ".join(sizes)


# --------------------------------------------------------------------------------------------------- a command line

_SUFFIXES = MappingProxyType({"k": 2**10, "m": 2**20, "g": 2**30})


def _whole_number(text: str) -> int:
    """Parse a positive whole number, as Megatron does, which knows no suffixes."""
    if text.isascii() and text.isdigit() and int(text[:20]) > 0:
        return int(text)
    number, suffix = text[:-1], text[-1:].lower()
    if suffix in _SUFFIXES and number.isascii() and number.isdigit():
        raise argparse.ArgumentTypeError(
            f"got {text!r}, which Megatron does not read; write {int(number) * _SUFFIXES[suffix]}"
        )
    hint = "; give the value, not the variable of a shell" if "$" in text else ""
    raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1 on{hint}")


# Sizes of the run and of the model, by flag.
_SIZES = """
    seq-length micro-batch-size global-batch-size recompute-num-layers
    tensor-model-parallel-size context-parallel-size pipeline-model-parallel-size
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels
    vocab-size num-experts moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size
    q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
    """.split()  # noqa: SIM905
_WORDS = ("recompute-method", "window-size", "window-attn-skip-freq", "moe-layer-freq")
_SWITCHES = """
    optimizer-cpu-offload sequence-parallel use-distributed-optimizer bf16 group-query-attention
    multi-latent-attention
    """.split()  # noqa: SIM905
# Flags with a value that a plan has no price for, and the value with which they change nothing.
_OTHER_VALUES = MappingProxyType(
    {
        "expert-model-parallel-size": "1",
        "expert-tensor-parallel-size": "1",
        "num-layers-per-virtual-pipeline-stage": None,
        "num-virtual-stages-per-pipeline-rank": None,
        "pipeline-model-parallel-layout": None,
        "fp8-format": None,
        "fp4-format": None,
        "mtp-num-layers": None,
        "cpu-offloading-num-layers": "0",
        "optimizer-offload-fraction": "1.0",
        "main-grads-dtype": "fp32",
        "main-params-dtype": "fp32",
        "exp-avg-dtype": "fp32",
        "exp-avg-sq-dtype": "fp32",
    }
)
_OTHER_SWITCHES = """
    fp16 use-megatron-fsdp use-torch-fsdp2 hybrid-context-parallel fine-grained-activation-offloading
    recompute-activations defer-embedding-wgrad-compute
    """.split()  # noqa: SIM905
_PRICED_OPTIONS = ("backward", "forward", "mesh_degree", "ulysses_placement")  # with their usual values
_LAYOUTS = ("zigzag", "striped")  # in which all ranks have as much of causal attention


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(message.removeprefix("argument "))


def _parsed(text: str) -> argparse.Namespace:
    """Return the flags that a plan knows, None for flags that are not there. Raises ValueError for wrong values."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in _SIZES:
        parser.add_argument(f"--{name}", type=_whole_number)
    for name in (*_WORDS, *_OTHER_VALUES):
        parser.add_argument(f"--{name}")
    for name in (*_SWITCHES, *_OTHER_SWITCHES):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--hierarchical-context-parallel-sizes", type=_whole_number, nargs="+")
    for name in ("recompute-modules", "cp-comm-type", "rampup-batch-size"):
        parser.add_argument(f"--{name}", nargs="+")
    add_arguments(parser)
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return parser.parse_known_args([word for word in words if word != "--"])[0]


def setting_of(text: str, gpus: int, per_node: int) -> Setting:
    """Return the setting that a command line, or the text of a file of flags, asks for.

    Args:
        text: the command line.
        gpus: of the whole job.
        per_node: GPUs in a node.

    Raises:
        ValueError: flags have wrong values, lack --seq-length, or ask for sizes that do not divide.
    """
    args = _parsed(text)
    if args.seq_length is None:
        raise ValueError("there is no --seq-length among the flags; add it")
    tensor, context, pipeline = (
        getattr(args, f"{name}_parallel_size") or 1 for name in ("tensor_model", "context", "pipeline_model")
    )
    if gpus % (tensor * context * pipeline):
        raise ValueError(
            f"{tensor} x {context} x {pipeline} (TP x CP x PP) does not divide {gpus} GPUs; give --gpus a multiple "
            f"of {tensor * context * pipeline}"
        )
    if context > 1 and args.seq_length % (2 * context):
        raise ValueError(
            f"--seq-length {args.seq_length} is not a multiple of {2 * context}, twice --context-parallel-size, as "
            "Megatron wants it"
        )
    data, micro_batch = gpus // (tensor * context * pipeline), args.micro_batch_size or 1
    batch = args.global_batch_size or micro_batch * data  # as Megatron has it
    if batch % (micro_batch * data):
        raise ValueError(
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro_batch} times the {data} "
            f"data-parallel ranks that {gpus} GPUs have; use a multiple of {micro_batch * data}"
        )
    strategy = strategy_of(args)
    inner = _ranks_in_node(args, strategy, context, max(1, per_node // tensor))
    granularity = args.recompute_granularity or "none"
    return Setting(
        tokens=args.seq_length,
        code=space(True).code,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data,
        inner=inner,
        batch=batch,
        micro_batch=micro_batch,
        recompute="mlp" if granularity == "selective" else granularity,
        keep=strategy.kept_share,
        loss_chunk=strategy.loss_chunk,
        mlp_chunk=strategy.mlp_chunk,
        offload=strategy.offload,
        offload_optimizer=args.optimizer_cpu_offload,
        ulysses=strategy.on(Topology(context // inner, inner)).degree,
        parts=max(map(strategy.parts_of, DIRECTIONS)),
        latents="expand" if strategy.latents == "expand" else AUTO,
    )


def _ranks_in_node(args: argparse.Namespace, strategy: Strategy, context: int, room: int) -> int:
    """Return how many context-parallel ranks a node has; it has room for `room` of them."""
    sizes = args.hierarchical_context_parallel_sizes
    if sizes is not None:
        if math.prod(sizes) != context:
            raise ValueError(
                f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} is for {math.prod(sizes)} "
                f"ranks, not for --context-parallel-size {context}; give ranks in a node, then nodes"
            )
        return int(sizes[0])
    inner = min(context, room) if strategy.ranks_per_node == AUTO else int(strategy.ranks_per_node)
    if context % inner:
        raise ValueError(
            f"--context-parallel-size {context} does not fill nodes that have room for {inner} of its ranks; use a "
            f"multiple of {inner}"
        )
    return inner


def unpriced(text: str, setting: Setting) -> list[str]:
    """Return sentences on how a command line differs from the plan that it is priced as; [] if it does not.

    They name flags that change memory or time and have no price, and flags that a plan assumes and the line lacks.

    Args:
        text: the command line, or the text of a file of flags.
        setting: the setting that `setting_of` has read from it.
    """
    args, strategy = _parsed(text), strategy_of(_parsed(text))
    without = [
        flag_of(name, value)
        for name, usual in _OTHER_VALUES.items()
        if (value := getattr(args, name.replace("-", "_"))) not in (None, usual)
    ]
    without += [flag_of(name) for name in _OTHER_SWITCHES if getattr(args, name.replace("-", "_"))]
    if args.rampup_batch_size:
        without.append(f"--rampup-batch-size {' '.join(args.rampup_batch_size)}")
    if setting.recompute == "full" and (args.recompute_method == "block" or (args.recompute_num_layers or 1) > 1):
        without.append(
            f"--recompute-method {args.recompute_method} --recompute-num-layers {args.recompute_num_layers}"
        )
    modules = args.recompute_modules or ["core_attn"]
    if setting.recompute == "mlp" and modules != ["moe" if args.num_experts else "mlp"]:
        without.append(f"--recompute-modules {' '.join(modules)} (priced as mlp)")
    if setting.context > 1 and (args.cp_comm_type or ["p2p"]) != ["burst"]:
        without.append(f"--cp-comm-type {' '.join(args.cp_comm_type or ['p2p'])} (priced as burst)")
    without += _unpriced_options(args, strategy, setting)
    needs = {"bf16": True, "use-distributed-optimizer": True, "sequence-parallel": setting.tensor > 1}
    lacks = [f"--{name}" for name, needed in needs.items() if needed and not getattr(args, name.replace("-", "_"))]
    sentences = [f"Not priced: {'; '.join(without)}."] if without else []
    return sentences + ([f"Priced as if the flags had {' '.join(lacks)}, which they lack."] if lacks else [])


def _unpriced_options(args: argparse.Namespace, strategy: Strategy, setting: Setting) -> list[str]:
    plain = Strategy()
    names = [name for name in _PRICED_OPTIONS if getattr(strategy, name) != getattr(plain, name)]
    if strategy.layout not in _LAYOUTS:
        names.append("layout")
    if strategy.schedule not in (AUTO, default_schedule_name(setting.topology.of_ulysses_groups(setting.ulysses))):
        names.append("schedule")
    flags = [flag_of(f"burst_{name}", getattr(strategy, name)) for name in names]
    if len(set(map(strategy.parts_of, DIRECTIONS))) > 1:
        flags.append(f"--burst-parts that differ (priced with {setting.parts} in both passes)")
    return flags + ([flag_of("burst_profile", args.burst_profile)] if args.burst_profile else [])


# ---------------------------------------------------------------------------------------------------------- the model


def check_model(text: str, model: ModelShape, setting: Setting) -> None:
    """Raise ValueError if a command line is for another model than `model`, or does not divide its heads and layers.

    Args:
        text: the command line, or the text of a file of flags.
        model: the sizes of the model that the plan is for.
        setting: the setting that `setting_of` has read from the command line.
    """
    if model.mixers or len({kind.attends for kind in model.kinds}) > 1:
        raise ValueError(
            f"the layers of {model.name} are not alike, or have other parts than attention, of which flags are not "
            "read; give --seq in place of --flags"
        )
    args = _parsed(text)
    differences = [*_other_sizes(args, model), *_other_windows(args, model), *_other_latents(args, model)]
    if differences:
        raise ValueError(
            f"the flags are for another model than {model.name}: {', '.join(differences)}; give --model the "
            "config.json of the model that they train, or correct them"
        )
    for flag, degree, units, count in (
        ("--tensor-model-parallel-size", setting.tensor, "heads", model.heads),
        ("--pipeline-model-parallel-size", setting.pipeline, "layers", model.layers),
    ):
        if count % degree:
            raise ValueError(f"{flag} {degree} does not divide the {count} {units} of {model.name}")
    asks_to_send = model.latent is not None and strategy_of(args).latents == "send"
    if asks_to_send and setting.context > 1 and latents_sent(model, setting) is None:
        raise ValueError(
            f"--burst-latents send does not go with --burst-ulysses-degree {setting.ulysses} and --burst-parts "
            f"{setting.parts}, which cut heads; leave these at 1, or use --burst-latents auto"
        )


def _other_sizes(args: argparse.Namespace, model: ModelShape) -> list[str]:
    """Return the sizes among the flags that differ from the model's, each with the size that the model has."""
    sizes = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "vocab_size": model.vocab,
        "num_experts": 0,
    }
    for kind in model.by_kind:
        sizes |= {"moe_ffn_hidden_size" if kind.experts else "ffn_hidden_size": kind.ffn}
        if kind.experts:
            sizes |= {"num_experts": kind.experts, "moe_router_topk": kind.active}
            sizes["moe_shared_expert_intermediate_size"] = kind.shared_ffn
    if model.latent is None:
        sizes["kv_channels"] = model.head_dim
    differences = [
        f"{flag_of(name, value)} (the model has {size})"
        for name, size in sizes.items()
        if (value := getattr(args, name)) not in (None, size)
    ]
    if args.num_experts is not None and (count := _layers_with_experts(args, model.layers)) != _experts_in(model):
        differences.append(
            f"experts in {count} of {model.layers} layers (the model has them in {_experts_in(model)})"
        )
    if model.latent is not None:
        return differences
    if args.kv_channels is None and (args.hidden_size, args.num_attention_heads) == (model.hidden, model.heads):
        usual = model.hidden // model.heads
        if usual != model.head_dim:
            differences.append(f"no --kv-channels (the model has heads of {model.head_dim})")
    groups = args.num_query_groups
    if args.num_attention_heads is not None and groups is None:
        groups = args.num_attention_heads  # without the flag every head has keys and values of its own
    if groups not in (None, model.kv_heads):
        written = "no --num-query-groups" if args.num_query_groups is None else f"--num-query-groups {groups}"
        differences.append(f"{written} (the model has {model.kv_heads} key/value heads)")
    return differences


def _experts_in(model: ModelShape) -> int:
    """Return how many layers have experts."""
    return sum(kind.layers for kind in model.by_kind if kind.experts)


def _layers_with_experts(args: argparse.Namespace, layers: int) -> int:
    """Return how many layers have experts, as Megatron reads its flags."""
    try:
        frequency = 1 if args.moe_layer_freq is None else _pattern(args.moe_layer_freq)
    except (SyntaxError, TypeError, ValueError):
        frequency = 0
    if isinstance(frequency, int) and frequency > 0:
        return -(-layers // frequency)
    if isinstance(frequency, int) or len(frequency) != layers:
        raise ValueError(
            f"--moe-layer-freq {args.moe_layer_freq} cannot be read; write a number from 1 on, or a list with 0 or 1 "
            f"for each of {layers} layers such as [0]*1+[1]*{layers - 1}"
        )
    return sum(map(bool, frequency))


def _other_latents(args: argparse.Namespace, model: ModelShape) -> list[str]:
    """Return the flags of latent attention that differ from the model, if flags give sizes of a model at all."""
    latent = model.latent
    if latent is None or not args.multi_latent_attention:
        if args.multi_latent_attention:
            return ["--multi-latent-attention (the model has none)"]
        says_sizes = latent is not None and args.num_layers is not None
        return ["no --multi-latent-attention (the model has it)"] if says_sizes else []
    sizes = {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.own_dim,
        "qk_pos_emb_head_dim": latent.shared_dim,
        "v_head_dim": latent.value_dim,
    }
    return [
        f"{flag_of(name, value) if value else f'no {flag_of(name)}'} (the model has {size or 'none'})"
        for name, size in sizes.items()
        if (value := getattr(args, name) or 0) != size
    ]


def _other_windows(args: argparse.Namespace, model: ModelShape) -> list[str]:
    """Return the windows among the flags if they differ from the model's; [] if flags give no sizes of a model."""
    if args.window_size is None and args.num_layers is None:
        return []
    window, layers = _windows(args, model.layers)
    if (window, layers) == (model.window, model.windowed):
        return []
    theirs = f"windows of {window} keys in {layers} of {model.layers} layers" if layers else "no --window-size"
    has = f"{model.window} keys in {model.windowed}" if model.windowed else "none"
    return [f"{theirs} (the model has {has})"]


def _windows(args: argparse.Namespace, layers: int) -> tuple[int, int]:
    """Return (keys in a window, layers that have it), as Megatron reads its flags."""
    if args.window_size is None:
        return 0, 0
    try:
        left = int(args.window_size.strip("()").split(",")[0])
        frequency = None if args.window_attn_skip_freq is None else _pattern(args.window_attn_skip_freq)
    except (SyntaxError, TypeError, ValueError):
        raise ValueError(
            f"--window-size {args.window_size} --window-attn-skip-freq {args.window_attn_skip_freq} cannot be read; "
            "write a pair such as 4095,0, and a number or a list such as [1,0]*16"
        ) from None
    if left < 0:
        return 0, 0
    if frequency is None:
        count = layers
    elif isinstance(frequency, int):
        count = layers - layers // frequency
    else:
        count = sum(map(bool, frequency[:layers]))
    return (left + 1, count) if count else (0, 0)


def _pattern(text: str) -> int | Sequence[int]:
    """Return a number, or a list that may be written as sums and multiples of lists."""

    def value(node: ast.expr) -> int | list[int]:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.List(elts=items):
                return [ast.literal_eval(item) for item in items]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)  # type: ignore[operator]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)  # type: ignore[operator]
        raise ValueError(f"{text!r} is not a number or a list")

    return value(ast.parse(text, mode="eval").body)
