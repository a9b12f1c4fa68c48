"""Hides GPUs from all tests but those of `pytest -m gpu`: a process that has initialised CUDA cannot fork ranks."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
