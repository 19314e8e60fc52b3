"""State space models: Mamba, Mamba-2 and stacks that mix them with attention."""
from opsbyte.ssm.conv import causal_conv
from opsbyte.ssm.hybrid import AttentionBlock, HybridStack, KVState, state_bytes
from opsbyte.ssm.mamba import MambaBlock, SSMState
from opsbyte.ssm.mamba2 import Mamba2Block
from opsbyte.ssm.scan import recurrence, selective_scan
from opsbyte.ssm.ssd import decay_mask, ssd

__all__ = [
    "AttentionBlock", "HybridStack", "KVState", "Mamba2Block", "MambaBlock", "SSMState",
    "causal_conv", "decay_mask", "recurrence", "selective_scan", "ssd", "state_bytes",
]
