"""What only some versions of torch have."""

import pytest
import torch

takes_tables = pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="tables in shards stay with FSDP before torch 2.12"
)
