"""The production attention: `impl.attention` over a sequence sharded across devices, and what a caller needs around it.

JAX and Pallas only; never imports the oracle or the harness that judges it. Tested in tests/impl.
"""

from impl.config import AttentionConfig, AttentionType
from impl.dispatch import attention
from impl.layout import reorder, restore
from impl.sharded import RESIDUAL_NAMES

__all__ = ["RESIDUAL_NAMES", "AttentionConfig", "AttentionType", "attention", "reorder", "restore"]
