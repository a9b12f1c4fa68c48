"""Training on packed documents over shaped links: what the layout "auto" is for."""

from __future__ import annotations

import pytest

from tests.support.netns import EmulatedCluster
from tests.support.packed_training import PackedTraining

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.alone]


@pytest.mark.skipif(EmulatedCluster.unavailable() is not None, reason=str(EmulatedCluster.unavailable()))
def test_documents_assigned_by_work_train_twice_as_fast_as_one_by_one_in_zigzag() -> None:
    found = PackedTraining(seq=512, mean_length=256, microbatches=2).by_turns(("zigzag", "auto"))
    assert found["auto"].tokens_per_s > 2 * found["zigzag"].tokens_per_s
