"""Run an unmodified training script with burst attention installed:

    torchrun --nproc-per-node 8 -m burst_plugin.run pretrain_gpt.py --context-parallel-size 8 --cp-comm-type burst ...
    deepspeed --num_gpus 8 --module burst_plugin.run train.py --deepspeed_config ds.json ...

Options of the launcher come before the script, the script's own after it.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from pathlib import Path

import torch.distributed as dist

from burst_plugin.frameworks import FRAMEWORKS, adapter_module

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Install a framework's adapter, then run the script as `python script` would."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    script = Path(options.script)
    if not script.is_file():
        raise SystemExit(f"burst_plugin.run: {script} is not a file; give the training script after the options")
    sys.argv = [options.script, *options.local_rank, *options.arguments]
    directory = script.resolve().parent
    framework = options.framework or _framework(script, options.arguments)
    sys.path.insert(0, str(directory))
    if options.cpu:
        adapter_module(framework, "cpu").prepare(directory)
    adapter = adapter_module(framework).install()
    if os.environ.get("RANK", "0") == "0":
        print(adapter, flush=True)
    _execute(script, bare_children=options.cpu)
    if options.cpu:
        _leave()


def _framework(script: Path, arguments: list[str]) -> str:
    """Whose script it is: the launcher's, of what lies beside it, is installed, or is named by it or its flags.

    With another framework's adapter it would train without a ring, so where that does not tell, SystemExit does.
    """
    if "CROSS_SIZE" in os.environ and "LOCAL_SIZE" in os.environ:  # which DeepSpeed's launcher sets
        return "deepspeed"
    if (script.resolve().parent / "megatron").is_dir():
        return "megatron"
    installed = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    text = " ".join([script.read_text(errors="replace"), *arguments])
    named = [name for name in installed if name in text or (name == "megatron" and "--cp-comm-type" in text)]
    for names in (installed, named):
        if len(names) == 1:
            return names[0]
    if not installed:
        raise SystemExit(
            "burst_plugin.run: neither megatron-core nor deepspeed is installed here, and no directory `megatron` "
            f"lies beside {script}: install one, or give the script inside its Megatron-LM checkout"
        )
    raise SystemExit(
        f"burst_plugin.run: {' and '.join(installed)} are installed, and {script} does not say whose script it is; "
        "put --framework megatron or --framework deepspeed before it"
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m burst_plugin.run",
        description="Run a training script of Megatron or DeepSpeed with burst attention installed.",
        epilog="Switch it on with --cp-comm-type burst (Megatron; `SCRIPT --help` lists the --burst-* flags), or "
        'with the block "burst_attention" in the configuration (DeepSpeed).',
    )
    parser.add_argument(
        "--framework",
        choices=FRAMEWORKS,
        help="whose adapter to install (default: what the launcher, the script or the environment says)",
    )
    parser.add_argument(  # DeepSpeed's launcher puts it before the script; it is the script's
        "--local_rank",
        dest="local_rank",
        action="append",
        default=[],
        type="--local_rank={}".format,
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--cpu", action="store_true", help="run on CPUs with gloo (slow; to try things out)")
    parser.add_argument("script", metavar="SCRIPT", help="the training script, such as pretrain_gpt.py")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser.parse_args(arguments)


def _execute(script: Path, *, bare_children: bool) -> None:
    """Run the script as `__main__`, in a module of its own that pickling can find.

    Processes that it spawns import it again, unless `bare_children`: CUDA is not redirected in them.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    if bare_children:
        module.__spec__ = importlib.machinery.ModuleSpec("__main__", None)  # multiprocessing takes it as imported
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)


def _leave() -> None:
    """End all ranks together and at once: gloo's threads now and then abort an orderly exit."""
    if dist.is_initialized():
        dist.barrier()
    for child in multiprocessing.active_children():  # such as what Megatron writes checkpoints with
        child.terminate()
        child.join(10)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
