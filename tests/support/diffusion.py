"""Tiny transformers of diffusers, with drawn parameters and inputs whose numbers of tokens few ranks divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Case(NamedTuple):
    """A model, what it is called with, and the target of its sample."""

    model: torch.nn.Module
    inputs: dict[str, Any]
    target: Tensor


def _wan(**inputs: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=10,
        freq_dim=8,
        ffn_dim=20,
        num_layers=2,
        rope_max_seq_len=16,
        image_dim=6 if "encoder_hidden_states_image" in inputs else None,
        added_kv_proj_dim=24 if "encoder_hidden_states_image" in inputs else None,
    )
    video = {"hidden_states": torch.randn(2, 4, 3, 6, 10), "encoder_hidden_states": torch.randn(2, 7, 10)}
    return model, {**video, "timestep": torch.tensor([31, 700]), **inputs}  # 45 tokens


def _image_to_video() -> tuple[torch.nn.Module, dict[str, Any]]:
    text = torch.randn(2, 512, 10)  # which the model has, as its processor counts the others from there
    return _wan(encoder_hidden_states_image=torch.randn(2, 5, 6), encoder_hidden_states=text)


def _wan_of_times() -> tuple[torch.nn.Module, dict[str, Any]]:
    return _wan(timestep=torch.randint(1000, (2, 45)))


def _ltx(times: bool = False) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=10,
    )
    is_text = torch.ones(2, 7)
    is_text[0, 4:] = 0
    return model, {
        "hidden_states": torch.randn(2, 30, 4),
        "encoder_hidden_states": torch.randn(2, 7, 10),
        "timestep": torch.rand(2, 30) * 1000 if times else torch.tensor([[31.0], [700.0]]),
        "encoder_attention_mask": is_text,
        "num_frames": 2,
        "height": 3,
        "width": 5,
    }


def _flux() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=10,
        pooled_projection_dim=6,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    at = torch.arange(15.0)
    return model, {
        "hidden_states": torch.randn(2, 15, 4),
        "encoder_hidden_states": torch.randn(2, 7, 10),
        "pooled_projections": torch.randn(2, 6),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.stack([0 * at, at // 5, at % 5], 1),
        "txt_ids": torch.zeros(7, 3),
        "guidance": torch.tensor([3.5, 2.0]),
    }


def _flux2() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=10,
        timestep_guidance_channels=8,
        axes_dims_rope=(4, 4, 4, 4),
    )
    names = ("hidden_states", "encoder_hidden_states", "timestep", "guidance")
    inputs = {name: x for name, x in _flux()[1].items() if name in names}
    return model, {**inputs, "img_ids": torch.rand(2, 15, 4), "txt_ids": torch.rand(2, 7, 4)}


def _cogvideox(rotary: bool = True) -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=6,
        text_embed_dim=10,
        num_layers=2,
        sample_width=10,
        sample_height=6,
        sample_frames=9,
        max_text_seq_length=7,
        use_rotary_positional_embeddings=rotary,
    )
    angles = torch.rand(45, 16)
    return model, {
        "hidden_states": torch.randn(2, 3, 4, 6, 10),
        "encoder_hidden_states": torch.randn(2, 7, 10),
        "timestep": torch.tensor([31, 700]),
        "image_rotary_emb": (angles.cos(), angles.sin()) if rotary else None,
    }


def _hunyuan_video() -> tuple[torch.nn.Module, dict[str, Any]]:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=10,
        pooled_projection_dim=6,
        rope_axes_dim=(4, 4, 8),
    )
    is_text = torch.ones(2, 7, dtype=torch.int64)
    is_text[0, 4:] = 0
    return model, {
        "hidden_states": torch.randn(2, 4, 3, 6, 10),
        "timestep": torch.tensor([31, 700]),
        "encoder_hidden_states": torch.randn(2, 7, 10),
        "encoder_attention_mask": is_text,
        "pooled_projections": torch.randn(2, 6),
        "guidance": torch.tensor([3500.0, 2000.0]),
    }


CASES: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]] = {
    "wan": _wan,
    "wan image to video": _image_to_video,
    "wan 2.2, a time per token": _wan_of_times,
    "ltx": _ltx,
    "ltx, a time per token": lambda: _ltx(times=True),
    "flux": _flux,
    "flux 2": _flux2,
    "cogvideox": _cogvideox,
    "cogvideox, sums of positions": lambda: _cogvideox(rotary=False),
    "hunyuan video": _hunyuan_video,
}


def build(name: str) -> Case:
    """Return a case in float64, the same each time. No parameter is at zero or one, as some are initialised."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model, inputs = CASES[name]()
        model.double()
        inputs = tree_map(lambda x: x.double() if is_floating(x) else x, inputs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)  # with larger ones softmax has next to no gradient
        for key in ("hidden_states", "encoder_hidden_states"):
            inputs[key].requires_grad_()
        return Case(model, inputs, torch.randn_like(inputs["hidden_states"]))


def is_floating(x: object) -> bool:
    """Return whether this is a tensor of floating-point numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


def trained(case: Case, scale: float = 1.0) -> dict[str, Tensor]:
    """Return the sample of one call, its loss, and the gradients of `scale` times that."""
    sample = case.model(**case.inputs).sample
    loss = (sample - case.target).square().mean()
    (loss * scale).backward()
    return {"sample": sample.detach(), "loss": loss.detach(), **gradients(case)}


def gradients(case: Case) -> dict[str, Tensor]:
    """Return the gradients of all parameters and inputs that have one, by name."""
    inputs = {name: x for name, x in case.inputs.items() if is_floating(x) and x.requires_grad}
    named = {name.removeprefix("module."): x for name, x in (*case.model.named_parameters(), *inputs.items())}
    return {name: x.grad for name, x in named.items() if x.requires_grad}
