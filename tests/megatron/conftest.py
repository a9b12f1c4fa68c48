"""Imports Megatron once, before ranks are forked, so that not every rank of every test has to."""

import pytest

pytest.importorskip("megatron", reason="megatron-core is not installed")

from burst_plugin.megatron import cpu

cpu.hide_cuda_packages()  # as every rank does, before Megatron looks for them
pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("megatron.core.distributed")
pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("megatron.core.optimizer")
pytest.importorskip("megatron.core.pipeline_parallel")
pytest.importorskip("megatron.core.ssm.gated_delta_net")
pytest.importorskip("megatron.core.models.mamba")
pytest.importorskip("megatron.core.models.multimodal.llava_model")
pytest.importorskip("burst_plugin.megatron.adapter")
