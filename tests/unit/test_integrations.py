"""What trainers of frameworks pass on to thinwire."""

from __future__ import annotations

import pytest
from torch import nn

import thinwire
from thinwire.integrations.attachment import Attachment


def test_trainers_take_no_outer_loop() -> None:
    """They average gradients over all ranks, and its errors would ask for arguments that a callback cannot have."""
    with pytest.raises(ValueError, match="outer= is for ranks that train alone"):
        Attachment(nn.Linear(2, 2), "", outer=thinwire.outer.diloco(every=8))
