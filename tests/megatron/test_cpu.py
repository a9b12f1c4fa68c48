"""Megatron-core on the CPU: what `cpu.enable()` redirects, and that Megatron's training loop then runs."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from burst_plugin.frameworks.wrapping import wrap
from tests.support.ranks import RankError, run_ranks

pytest.importorskip("megatron.core")

from burst_plugin.megatron import cpu
from burst_plugin.megatron.cpu import scripts
from tests.support.megatron_gpt import (
    GptRun,
    StepResult,
    build,
    forward_backward,
    join,
    leave,
    one_step,
    random_tokens,
    transformer_config,
)

pytestmark = pytest.mark.megatron

STEPS = 3


def test_import_has_no_side_effect() -> None:
    code = (
        "import torch; before = (torch.cuda.synchronize, torch.cuda.Stream)\n"
        "import burst_plugin.megatron.cpu, os\n"
        "assert before == (torch.cuda.synchronize, torch.cuda.Stream)\n"
        "assert 'TORCHDYNAMO_DISABLE' not in os.environ"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_a_process_group_of_gpus_is_refused() -> None:
    def begun(rank: int) -> None:
        cpu.enable(force=True)
        dist.init_process_group("nccl")

    with pytest.raises(RankError, match=re.escape("init_process_group('nccl') needs GPUs, which --cpu hides; write")):
        run_ranks(begun, 1, init=False)


def test_enable_redirects_once_and_says_what() -> None:
    def redirected(rank: int) -> list[str]:
        lines = cpu.enable(force=True)
        synchronize = torch.cuda.synchronize
        assert cpu.enable() == lines  # a second time is no error even though a "GPU" is there now
        assert torch.cuda.synchronize is synchronize

        index = torch.cuda.current_device()
        made = [
            torch.ones(2, device="cuda"),
            torch.ones(2, device="cuda:0", pin_memory=True),
            torch.ones(2, device=torch.device("cuda", index)),
            torch.ones(2, device=index),
            torch.ones(2).to("cuda"),
            torch.ones(2).to(index),
            torch.ones(2).cuda(non_blocking=True).pin_memory(),
            *torch.nn.Linear(2, 2).to(index).cuda().parameters(),
        ]
        thread = threading.Thread(target=lambda: made.append(torch.ones(2, device="cuda")))
        thread.start()
        thread.join()
        assert len(made) == 10
        assert {tensor.device.type for tensor in made} == {"cpu"}
        generators = [
            torch.Generator(),
            torch.Generator(index),
            torch.Generator(device="cuda"),
            torch.default_generator,
        ]
        assert all(isinstance(each, torch.Generator) for each in (torch.default_generator, *generators))
        assert {each.device.type for each in generators} == {"cpu"}
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"
        assert torch.ones(2).type("torch.cuda.DoubleTensor").dtype == torch.float64
        assert torch.ones(2, device="meta").device.type == "meta"
        assert torch.device("cpu", 0).index == 0
        return lines

    lines = run_ranks(redirected, 1, init=False)[0]
    assert any("torch.cuda" in line for line in lines)
    assert any("cpu" in line for line in lines)


@pytest.mark.parametrize("late", ["", "import apex, amp_C\n", "import apex, megatron.core.optimizer\n"])
def test_packages_that_need_a_gpu_are_not_taken(late: str, tmp_path: Path) -> None:
    """Megatron's optimizers and norms are Transformer Engine's or Apex' wherever these can be imported."""
    for name in ("transformer_engine", "apex", "amp_C") if "megatron" not in late else ("apex",):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("print('found', __name__)\n")
    code = "from burst_plugin.megatron import cpu\ncpu.enable(force=True)\n"
    code += "from megatron.core.optimizer import clip_grads, distrib_optimizer\n"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', Path.cwd())}"}
    command = [sys.executable, "-W", "ignore", "-c", late + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "megatron" in late:
        assert "has been imported beside apex" in done.stderr.splitlines()[-1]
        assert "Call enable() before megatron.core is imported" in done.stderr.splitlines()[-1]
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("found") == late.count(",") * 2


def test_cuda_random_state_is_the_cpu_generators() -> None:
    def drawn(rank: int) -> list[torch.Tensor]:
        cpu.enable(force=True)
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        tracker = CudaRNGStatesTracker()
        tracker.add("one", 1)
        tracker.add("two", 2)
        torch.cuda.manual_seed(0)
        outside = torch.rand(3)
        torch.cuda.manual_seed(0)
        with tracker.fork("one"):
            first = torch.rand(3)
            with tracker.fork("two"):
                second = torch.rand(3)
            rest = torch.rand(3)
        again = [torch.rand(3)]
        for seed, count in ((1, 6), (2, 3)):
            torch.manual_seed(seed)
            again.append(torch.rand(count))
        return [outside, torch.cat([first, rest]), second, *again]

    (found,) = run_ranks(drawn, 1, init=False)
    outside, first_and_rest, second, *again = found
    assert torch.equal(again[0], outside), "what is drawn inside a fork leaves no trace outside"
    assert torch.equal(again[1], first_and_rest)
    assert torch.equal(again[2], second)


def test_enable_refuses_to_hide_a_gpu() -> None:
    def refused(rank: int) -> str:
        torch.cuda.is_available = lambda: True
        with pytest.raises(RuntimeError) as caught:
            cpu.enable()
        return str(caught.value)

    message = run_ranks(refused, 1, init=False)[0]
    assert all(part in message for part in ("got", "expected", "force=True"))


def test_redirection_holds_inside_backward() -> None:
    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.full((), 2.0, device="cuda")

    def gradients(rank: int) -> list[Any]:
        cpu.enable(force=True)
        found = []
        for run_backward in (torch.Tensor.backward, torch.autograd.backward):
            x = torch.ones(2, requires_grad=True)
            run_backward(Recomputed.apply(x).sum())
            found.append(None if x.grad is None else x.grad.tolist())
        x = torch.ones(2, requires_grad=True)
        return [*found, torch.autograd.grad(Recomputed.apply(x).sum(), x)[0].tolist()]

    assert run_ranks(gradients, 1, init=False) == [[[2.0, 2.0]] * 3]


def test_sizes_of_what_experts_exchange_may_be_tensors() -> None:
    """On GPUs Megatron makes arrays of them as it moves them to the host."""

    def exchange(rank: int) -> list[float]:
        cpu.enable(force=True)
        received = torch.empty(4)
        sizes = torch.tensor([1, 3]) if rank == 0 else torch.tensor([3, 1])
        sent = torch.arange(4.0) + 10 * rank
        dist.all_to_all_single(received, sent, output_split_sizes=sizes, input_split_sizes=sizes)
        return received.tolist()

    assert run_ranks(exchange, 2) == [[0.0, 10.0, 11.0, 12.0], [1.0, 2.0, 3.0, 13.0]]


def test_megatrons_own_attention_takes_values_of_another_head_dim() -> None:
    """Multi-latent attention on one rank has no other attention without Transformer Engine."""

    def attend(rank: int) -> list[float]:
        join(GptRun(layers=1))
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.enums import AttnMaskType

        wrap(DotProductAttention, "__init__", scripts.with_head_dims)
        config = transformer_config(GptRun(layers=1, groups=8))
        options = {"k_channels": 8, "v_channels": 6, "softmax_scale": 0.3}
        core = DotProductAttention(config, 1, AttnMaskType.causal, "self", **options)  # type: ignore[arg-type]
        q, k, v = (torch.randn(5, 2, 8, dim, requires_grad=True) for dim in (8, 8, 6))
        masked = torch.ones(1, 1, 5, 5).triu(1).bool()
        rows = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        expected = scaled_dot_product_attention(*rows, is_causal=True, scale=0.3).permute(2, 0, 1, 3).flatten(2)
        results = [
            (out, torch.autograd.grad(out.sin().sum(), (q, k, v))) for out in (core(q, k, v, masked), expected)
        ]
        (out, grads), (right, right_grads) = results
        return [float((x - y).abs().max()) for x, y in zip((out, *grads), (right, *right_grads), strict=True)]

    (errors,) = run_ranks(attend, 1)
    assert max(errors) < 1e-6


def test_mocks_in_place_of_classes_become_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`isinstance` takes no mock, which Megatron has in place of classes that derive from Transformer Engine's."""
    mock, other = MagicMock(), MagicMock()
    modules = [types.ModuleType(f"megatron.{name}") for name in ("one", "two")]
    for module in modules:
        vars(module).update(TELinear=mock, TENorm=other, te=mock)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    scripts.replace_mocks_by_classes()
    one, two = (vars(module) for module in modules)
    assert isinstance(one["TELinear"], type)
    assert one["TELinear"] is two["TELinear"]
    assert one["TELinear"] is not one["TENorm"]
    assert one["te"] is mock, "packages stay mocks"


@pytest.mark.parametrize("batched", [False, True])
def test_a_message_is_what_was_sent_even_if_it_is_freed_on_the_way(batched: bool) -> None:
    """Megatron's interleaved pipeline frees outputs that the next stage has not fetched yet."""

    def exchange(rank: int) -> list[list[float]]:
        """Return the different numbers in each message that came."""
        cpu.enable(force=True)
        from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

        def start(what: Any, tensor: torch.Tensor, peer: int) -> Any:
            return dist.batch_isend_irecv([dist.P2POp(what, tensor, peer)])[0] if batched else what(tensor, peer)

        found = []
        for size in (64, 4096, 2**20):
            if rank == 0:
                output = torch.full((size,), 7.0)
                sent = start(dist.isend, output, 1)
                deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
                _others = [torch.full((size,), -1.0) for _ in range(20)]  # where it was, among other places
                dist.barrier()
                sent.wait()
            else:
                dist.barrier()
                received = torch.empty(size)
                start(dist.irecv, received, 0).wait()
                found.append(received.unique().tolist())
        return found

    assert run_ranks(exchange, 2) == [[], [[7.0]] * 3]


def train(rank: int, run: GptRun) -> list[float]:
    """Losses of a few steps of Megatron's schedule, DistributedDataParallel and optimizer on one batch."""
    model = build(run)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.0, use_distributed_optimizer=run.distributed_optimizer
    )
    optimizer = get_megatron_optimizer(options, [model])
    losses = []
    for _ in range(STEPS):
        losses.append(forward_backward(model, run, random_tokens(run)))
        succeeded, grad_norm, _ = optimizer.step()
        assert succeeded
        assert math.isfinite(grad_norm)
        optimizer.zero_grad()
    leave()
    return losses


@pytest.mark.parametrize(
    ("world_size", "change"),
    [
        (1, {}),
        (2, {"tp": 2}),
        (2, {"tp": 2, "sequence_parallel": True}),
        (2, {"pp": 2}),
        (2, {"pp": 2, "recompute": "full", "distributed_optimizer": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_megatron_trains(world_size: int, change: dict[str, Any]) -> None:
    run = replace(GptRun(), **change)
    results = run_ranks(train, world_size, run, timeout_s=180)
    for losses in results:
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0] - 0.05, losses
        assert losses == pytest.approx(results[0])


@pytest.fixture(scope="module")
def one_rank() -> StepResult:
    return run_ranks(step, 1, GptRun(), timeout_s=180)[0]


def step(rank: int, run: GptRun) -> StepResult:
    return one_step(run, random_tokens(run))


@pytest.mark.parametrize(
    ("world_size", "change"),
    [
        (1, {"recompute": "selective"}),
        (1, {"per_token_loss": True}),
        (2, {"tp": 2, "sequence_parallel": True}),
        (2, {"pp": 2, "recompute": "full"}),
        (2, {"distributed_optimizer": True}),
        (4, {"tp": 2, "pp": 2}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_the_builder_gives_one_model_however_it_is_cut(
    one_rank: StepResult, world_size: int, change: dict[str, Any]
) -> None:
    for result in run_ranks(step, world_size, replace(GptRun(), **change), timeout_s=180):
        assert result.loss == pytest.approx(one_rank.loss, rel=1e-6)
        assert result.grads.keys() == one_rank.grads.keys()
        for name, expected in one_rank.grads.items():
            error = (result.grads[name] - expected).norm() / expected.norm()
            assert error < 1e-5, f"{name}: {error:.2e}"


def test_a_checkouts_script_runs_unmodified(tmp_path: Path) -> None:
    """With a stand-in for a Megatron-LM checkout: what it has beside megatron.core, and a script."""
    files = {
        "megatron/training/__init__.py": "",
        "megatron/training/arguments.py": """
def add_megatron_arguments(parser): return parser
def validate_args(args, defaults): raise AssertionError
""",
        "megatron/training/initialize.py": """
from megatron.core.transformer.custom_layers import batch_invariant_kernels  # it imports triton
def _warmup_jit_function(): raise AssertionError
""",
        "megatron/legacy/__init__.py": "",
        "megatron/legacy/fused_kernels.py": "def load(args): raise AssertionError",
        "pretrain_gpt.py": """
import sys, torch
from megatron.core.datasets.utils import compile_helpers
from megatron.legacy import fused_kernels
from megatron.training import arguments, initialize
compile_helpers(), fused_kernels.load(None), initialize._warmup_jit_function()
assert torch.ones(2, device="cuda").device.type == "cpu"
print(__name__, sys.argv[1:])
""",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "burst_plugin.run", "--cpu", str(tmp_path / "pretrain_gpt.py"), "--cp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ ['--cp', '2']"
    assert "argument parser knows --burst-backward" in done.stdout


def test_the_adapter_is_installed_without_triton() -> None:
    """As beside a PyTorch for CPUs, which comes without it; and nothing finds the stand-in afterwards."""
    code = """
import sys
sys.modules["triton"] = None  # importing it fails
from burst_plugin import megatron
assert "Mamba-2" in str(megatron.install())
assert "triton" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr


def test_scans_of_mamba_are_those_of_its_definition() -> None:
    """S <- e^(dt A) S + dt x B^T, out = (S C + D x) silu(z), with dt = softplus(dt + bias), head by head."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    generator = torch.Generator(device="cpu").manual_seed(0)
    x, z, dt, B, C, A, D, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        for shape in ((2, 9, 4, 3), (2, 9, 4, 3), (2, 9, 4), (2, 9, 2, 5), (2, 9, 2, 5), (4,), (4,), (4,))
    )
    A = -A.exp()
    found = mamba_chunk_scan_combined(x, dt, A, B, C, 4, D=D, z=z, dt_bias=bias, dt_softplus=True)
    state = torch.zeros(2, 4, 3, 5, dtype=torch.float64, device="cpu")
    for t in range(9):
        step = torch.log1p((dt[:, t] + bias).exp())
        added = torch.einsum("bh,bhp,bhn->bhpn", step, x[:, t], B[:, t].repeat_interleave(2, 1))
        state = (step * A).exp()[..., None, None] * state + added
        out = torch.einsum("bhpn,bhn->bhp", state, C[:, t].repeat_interleave(2, 1)) + D[:, None] * x[:, t]
        torch.testing.assert_close(found[:, t], out * z[:, t] * z[:, t].sigmoid())


def test_transformers_takes_functions_on_cpus_for_no_packages() -> None:
    """It would otherwise import other functions from them."""
    utils = pytest.importorskip("transformers.utils.import_utils")
    for name in ("is_flash_linear_attention_available", "is_mamba_2_ssm_available", "is_mamba_ssm_available"):
        check = getattr(utils, name, None)
        assert check is None or not check()


def _layers_of_specs(rank: int) -> list[float]:
    """Errors of layers in place of Transformer Engine's, of a spec that was imported before them."""
    from tests.support.megatron_hybrid import stack_spec

    spec, errors = stack_spec(), []
    for normalization, norm in (("RMSNorm", rms_norm), ("LayerNorm", layer_norm)):
        run = GptRun(cp_comm_type="burst", config={"normalization": normalization, "layernorm_epsilon": 0.3})
        join(run)
        config = transformer_config(run)
        kind = spec.submodules.mamba_layer.submodules.mixer.submodules.in_proj
        options = {"init_method": config.init_method, "gather_output": False, "bias": False, "skip_bias_add": False}
        layer = kind(run.hidden, 6, config=config, is_expert=False, tp_comm_buffer_name="fc1", **options)
        weights = {name: each for name, each in layer.named_parameters() if name != "weight"}
        assert list(weights) == ["layer_norm_weight", "layer_norm_bias"][: len(weights)]
        x = torch.randn(3, 2, run.hidden, device="cpu")
        with torch.no_grad():
            for each in weights.values():
                each.normal_()
            right = norm(x, (run.hidden,), *weights.values(), eps=0.3) @ layer.weight.T
            errors.append(float((layer(x)[0] - right).abs().max()))
        leave()
    config.layernorm_zero_centered_gamma = True
    with pytest.raises(ValueError, match="drop --apply-layernorm-1p"):
        spec.submodules.moe_layer.submodules.pre_mlp_layernorm(config, 8)
    return errors


def test_layers_of_specs_are_normed_as_transformer_engines() -> None:
    assert max(run_ranks(_layers_of_specs, 1)[0]) < 1e-6


def test_the_hadamard_transform_is_that_of_its_matrix() -> None:
    from burst_plugin.megatron.cpu.mixer_kernels import hadamard_transform

    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = torch.randn(3, 2, 16, dtype=torch.float64)
    torch.testing.assert_close(hadamard_transform(x, scale=0.25), x @ matrix * 0.25)
    with pytest.raises(NotImplementedError, match="of 12 numbers"):
        hadamard_transform(x[..., :12])
