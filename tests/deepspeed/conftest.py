"""Imports DeepSpeed and transformers once, before ranks are forked, so that not every rank of every test has to."""

import logging
import warnings

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tests.support.deepspeed_run")
logging.disable(logging.WARNING)  # of ranks, which say much
warnings.filterwarnings("ignore", category=FutureWarning)
