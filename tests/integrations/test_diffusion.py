"""Diffusion transformers of diffusers on a ring, against one rank without it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from burst_plugin import ContextParallel, Tokens
from burst_plugin.integrations.caught_attention import CaughtAttention
from tests.support.ranks import run_ranks

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
diffusion = pytest.importorskip("burst_plugin.integrations.diffusion")
support = pytest.importorskip("tests.support.diffusion")

Tensors = dict[str, Tensor]


@cache
def _truth(name: str) -> Tensors:
    found: Tensors = support.trained(support.build(name))
    return found


def _summed(found: Tensors) -> Tensors:
    """Return what was found on a rank, with its gradients summed over ranks."""
    for name, x in found.items():
        if name not in ("sample", "loss"):
            dist.all_reduce(x)
    return found


def _compare(found: Tensors, truth: Tensors, bound: float, of: str) -> None:
    assert found.keys() == truth.keys()
    assert len(found) > 20
    for name, expected in truth.items():
        error, size = float((found[name] - expected).norm()), float(expected.norm())
        # Softmax has no gradient by what it adds to all scores of a row, as biases of keys do: all others have one.
        assert error <= (bound * size if size > 1e-9 else 1e-12), (of, name, error, size)


def _bound(name: str) -> float:
    return 1e-5 if name.startswith("wan") else 1e-11  # parts of Wan are in float32 in any case


def _train_all(rank: int) -> dict[str, Tensors]:
    cp = ContextParallel(dist.group.WORLD)
    found = {}
    for name in support.CASES:
        case = support.build(name)
        assert diffusion.prepare(case.model, cp) is case.model
        found[name] = _summed(support.trained(case))
    return found


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_samples_and_every_gradient_equal_one_rank(ranks: int) -> None:
    for found in run_ranks(_train_all, ranks, timeout_s=120.0)[::3]:
        for name in support.CASES:
            _compare(found[name], _truth(name), _bound(name), name)


def _shorter(case: Any) -> Any:
    inputs = {**case.inputs, "encoder_hidden_states": case.inputs["encoder_hidden_states"].detach()[:, :5]}
    return case._replace(inputs={**inputs, "txt_ids": torch.zeros(5, 3)})


def _train_twice(case: Any) -> Tensors:
    """Train on two calls of unlike lengths, whose blocks are computed again after both."""
    case.model.enable_gradient_checkpointing()
    losses = [(each.model(**each.inputs).sample - each.target).square().mean() for each in (_shorter(case), case)]
    sum(losses).backward()
    found: Tensors = support.gradients(case)
    return found


def _lora(case: Any) -> Any:
    """Return a case of which LoRA alone is trained, on attention and on MLPs."""
    case.model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "proj_mlp", "net.0.proj"]))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for parameter in case.model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    return case


def _whole(found: Tensors) -> Tensors:
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def _train_otherwise(rank: int) -> dict[str, Tensors]:
    cp = ContextParallel(dist.group.WORLD)

    def prepared() -> Any:
        case = support.build("flux")
        return case._replace(model=diffusion.prepare(case.model, cp))

    found = {"twice": _summed(_train_twice(prepared()))}
    case = prepared()
    copied = case._replace(model=copy.deepcopy(case.model))
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.zero_()
    found["copied"] = _summed(support.trained(copied))
    case = prepared()
    inputs = {name: x.detach() for name, x in case.inputs.items()}
    case = case._replace(model=DistributedDataParallel(case.model), inputs=inputs)
    found["ddp"] = support.trained(case, scale=cp.ranks)
    case = prepared()
    for block in (*case.model.transformer_blocks, *case.model.single_transformer_blocks, case.model):
        fully_shard(block)
    found["lora"] = _summed(support.trained(_lora(prepared())))
    found["fsdp"] = _whole(support.trained(case._replace(inputs=inputs), scale=cp.ranks))
    return found


def test_checkpoints_copies_lora_ddp_and_fsdp() -> None:
    case = support.build("flux")
    truth = {"twice": _train_twice(case), "copied": _truth("flux")}
    truth["lora"] = support.trained(_lora(support.build("flux")))
    truth["ddp"] = truth["fsdp"] = {name: x for name, x in _truth("flux").items() if name not in case.inputs}
    for found in run_ranks(_train_otherwise, 2, timeout_s=120.0):
        for name, expected in truth.items():
            _compare(found[name], expected, 1e-11, name)


class _Attention(torch.nn.Module):
    """Attention whose queries are in another type than its values, as norms make them under autocast on GPUs."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x.bfloat16(), **options)


def test_attention_under_autocast_and_options_that_are_refused() -> None:
    caught, plain, x = _Attention(), _Attention(), torch.randn(2, 3, 5, 8)
    CaughtAttention("attn", ContextParallel(None), lambda: Tokens(5)).watch(caught)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = caught(x, scale=0.5)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, plain(x, scale=0.5), rtol=2e-2, atol=2e-2)
    for options in ({"dropout_p": 0.1}, {"is_causal": True}):
        with pytest.raises(ValueError, match=r"attn has dropout_p=.*, which is not known on a ring"):
            caught(x.bfloat16(), **options)
    assert plain(x.bfloat16(), is_causal=True).shape == x.shape, "no mode is left after an error"


@contextmanager
def _refused(found: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        found[name] = str(error)


def _refusals(rank: int) -> dict[str, str]:
    cp = ContextParallel(dist.group.WORLD)
    found: dict[str, str] = {}

    def refuse(name: str, family: str, change: Callable[[Any], Any] = lambda model: None, **inputs: Any) -> None:
        case = support.build(family)
        with _refused(found, name), torch.no_grad():
            model = diffusion.prepare(case.model, cp)
            change(model)
            model(**{**case.inputs, **inputs})

    refuse("noise", "wan", hidden_states=torch.randn(2, 4, 3, 6, 10).double() + rank)
    refuse("twice", "wan", lambda model: diffusion.prepare(model, cp))
    refuse("cache", "wan", lambda model: model.enable_cache(diffusers.FirstBlockCacheConfig()))
    refuse("parallelism", "wan", lambda model: setattr(model, "_parallel_config", True))
    refuse("few", "flux", encoder_hidden_states=torch.zeros(2, 1, 10).double(), txt_ids=torch.zeros(1, 3))
    refuse("unlike", "flux", img_ids=torch.zeros(14, 3))
    refuse("controlnet", "flux", controlnet_block_samples=[torch.zeros(2, 15, 32)])
    refuse("mask", "flux", joint_attention_kwargs={"attention_mask": torch.zeros(2, 1, 22, 22)})
    refuse(
        "ip adapter",
        "flux",
        _give_ip_adapter,
        joint_attention_kwargs={"ip_hidden_states": [torch.zeros(2, 3, 6).double()]},
    )
    # The last one: it would be the backend of all models made afterwards.
    refuse("backend", "wan", lambda model: model.set_attention_backend("flex"))
    return found


def _give_ip_adapter(model: Any) -> None:
    kind = diffusers.models.transformers.transformer_flux.FluxIPAdapterAttnProcessor
    model.transformer_blocks[0].attn.set_processor(kind(32, 6).double())


REFUSED = {
    "noise": "hidden_states",
    "twice": "on a ring already",
    "cache": "leave out diffusers' hook fbc_block_hook, diffusers' hook fbc_leader_block_hook",
    "backend": "blocks.0.attn1 has attention that is not PyTorch's scaled_dot_product_attention",
    "parallelism": "leave out enable_parallelism()",
    "few": "1 text tokens are too few for 2 ranks",
    "unlike": "a tensor [14, 3] has 14 image tokens, and an earlier one 15",
    "controlnet": "leave out the argument controlnet_block_samples",
    "mask": "attn_mask [2, 1, 22, 22] of torch.float32 is not known on a ring",
    "ip adapter": "transformer_blocks.0.attn has a second attention",
}


def test_what_would_see_a_part_of_the_tokens_is_refused_by_name() -> None:
    for found in run_ranks(_refusals, 2):
        assert found.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert text in found[name], found[name]


def test_models_that_are_not_known_are_refused_by_name() -> None:
    cp = ContextParallel(None)
    with pytest.raises(ValueError, match=r"Linear is not known on a ring: .* known are WanTransformer3DModel"):
        diffusion.prepare(torch.nn.Linear(2, 2), cp)
    with pytest.raises(ValueError, match="not a ContextParallel"):
        diffusion.prepare(support.build("wan").model, None)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_single_layers": 1}
    model = diffusers.HunyuanVideoTransformer3DModel(
        **sizes, rope_axes_dim=(4, 4, 8), image_condition_type="token_replace"
    )
    with pytest.raises(ValueError, match="with image_condition_type='token_replace' does not run on a ring"):
        diffusion.prepare(model, cp)
