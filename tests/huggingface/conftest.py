"""Imports DeepSpeed and transformers once, before ranks are forked, so that not every rank of every test has to."""

import warnings

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
quiet_ranks = pytest.importorskip("tests.support.deepspeed_run").quiet_ranks
warnings.filterwarnings("ignore", category=FutureWarning)
