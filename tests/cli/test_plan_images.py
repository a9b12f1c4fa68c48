"""`burst plan --model` with images in each sequence: what it prints and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from burst_plugin.cli import main

CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
DEEPSPEED = ("--framework", "deepspeed")


def printed(capsys: pytest.CaptureFixture[str], config: str, *words: str) -> str:
    assert main(["plan", "--model", str(CONFIGS / f"{config}.json"), *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], config: str, *words: str) -> str:
    path = config if config.startswith("/") else str(CONFIGS / f"{config}.json")
    assert main(["plan", "--model", path, *words]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_images_of_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "qwen3_vl_8b", "--seq", "128k", "--images", "20", "--image-tokens", "1024")
    assert out.startswith("qwen3_vl (8.77 G parameters) on 131,072 tokens, deepspeed, ")
    assert "\nImages: 20 of 1,024 tokens and 4,096 patches, together 20,480 tokens; tower of 0.58 G param" in out
    ring = re.search(r"CP (\d+) x", out)
    assert ring is not None
    most = -(-20 // int(ring[1]))
    share = f"{most} of 20, {most * int(ring[1]) / 20:.2f} times the mean"
    assert f"\n  the busiest rank of a ring encodes {share}\n" in out
    assert re.search(r"\n  tower, kept +\d+\.\d GiB\n", out)
    assert re.search(r"\n  tower of images +\d+\.\d s\n", out)


@pytest.mark.parametrize(
    ("config", "words", "images"),
    [
        ("gemma_3_4b", ("--images", "8", "--frozen-tower"), "8 of 256 tokens and 4,096 patches, together 2,048"),
        ("llava_1_5_7b", ("--images", "2"), "2 of 576 tokens and 576 patches"),
        ("llava_1_5_7b", ("--images", "2", "--image-tokens", "1000"), "4 of 576 tokens and 576 patches"),
        ("internvl3_8b", ("--images", "2", "--frames", "6"), "8 of 256 tokens and 1,024 patches"),
        ("mistral_small_3_1_24b", ("--images", "2", "--image-tokens", "500"), "2 of 500 tokens and 2,000 patches"),
        ("qwen2_5_vl_7b", ("--frames", "65", "--image-tokens", "64"), "33 of 64 tokens and 256 patches"),
    ],
)
def test_images_tiles_and_frames(
    config: str, words: tuple[str, ...], images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, config, "--seq", "64k", "--gpus", "16", *words)
    assert f"\nImages: {images}" in out
    assert ("; frozen tower of " in out) == ("--frozen-tower" in words)


@pytest.mark.parametrize("framework", ["deepspeed", "megatron"])
def test_text_alone(framework: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(CONFIGS / "qwen3_vl_8b.json")
    assert main(["plan", "--model", path, "--seq", "64k", "--framework", framework]) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen3_vl_text (8.19 G parameters)")
    assert "\nText alone, without the model's tower; add --images for images in each sequence\n" in out
    assert "tower, kept" not in out


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        ("qwen3_vl_8b", ("--image-tokens", "64"), "--image-tokens has no effect without --images or --frames"),
        ("qwen3_vl_8b", ("--frozen-tower",), "--frozen-tower has no effect without --images or --frames"),
        ("qwen3_vl_8b", ("--images", "8", *DEEPSPEED), "have any size; add --image-tokens"),
        (
            "qwen3_vl_8b",
            ("--images", "8", "--image-tokens", "64", "--framework", "megatron"),
            "plans for megatron cannot count towers of images; use --framework deepspeed, or plan text alone",
        ),
        (
            "qwen3_vl_8b",
            ("--images", "800", "--image-tokens", "1024", *DEEPSPEED),
            "800 images of 1,024 tokens each take 819,200 tokens, and a sequence has 65,536",
        ),
        ("gemma_3_4b", ("--frames", "8", *DEEPSPEED), "gemma3 takes no video; give frames as --images"),
        ("qwen3_next_80b_a3b", ("--images", "8", *DEEPSPEED), "has no vision_config, so there are no images"),
    ],
)
def test_what_does_not_fit_is_refused(
    config: str, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, config, "--seq", "64k", *words)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "kimi_k25"}, "model_type='kimi_k25', whose tower is not known; known are qwen2_5_vl, "),
        ({"vision_config": {"model_type": "dinov2"}}, "vision_config of model_type='dinov2', whose sizes are not"),
        ({"vision_config": {"patch_size": "small"}}, "vision_config has patch_size='small', expected a positive"),
        ({"vision_config": {"patch_size": [1, 2, 3]}}, "vision_config has patch_size=[1, 2, 3], expected a pos"),
        ({"mm_tokens_per_image": 0}, "mm_tokens_per_image=0, expected a positive whole number"),
    ],
)
def test_towers_that_are_not_known_are_refused_by_name(
    change: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((CONFIGS / "gemma_3_4b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert message in refused(capsys, str(tmp_path), "--seq", "64k", "--images", "8", *DEEPSPEED)
