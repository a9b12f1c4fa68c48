"""Hides GPUs from all tests but `pytest -m gpu` and `-m nccl`: a process that has initialised CUDA cannot fork."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr not in ("gpu", "nccl"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
