"""Sizes of blocks with which small calls are computed as large ones are."""

import pytest


@pytest.fixture
def tiles(set_blocks):
    """Kernels take all sizes, in blocks with ragged ends."""
    set_blocks(
        numpy_untiled_logits=0,
        numpy_min_head_logits=0,
        numpy_min_logits=0,
        numpy_rows=4,
        numpy_large_rows=4,
        numpy_columns=5,
        numpy_min_part=5,
        sdpa_mask_logits=0,
    )


@pytest.fixture(params=["blocks", "at once"])
def small_blocks(tiles, set_blocks, request):
    """Kernels take all sizes, in blocks with ragged ends or all logits at once."""
    if request.param == "at once":
        set_blocks(numpy_untiled_logits=2**18)
