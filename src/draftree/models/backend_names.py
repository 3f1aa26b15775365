"""Names of attention implementations and of linear kernels, as users type them; free of torch."""

from typing import Literal

EXACT = "draftree"
"""The name of the attention in `invariant_attention.py`."""
GROUPED = "grouped"
"""The name of the attention in `grouped_attention.py`."""
ATTENTION = ("sdpa", "eager", GROUPED, EXACT)
"""The attention implementations that accept any mask, and so the mask of a draft tree."""
Kernels = Literal["stock", "packed", "native", "tiled"]
"""The kernels of linear layers on a CPU.

`stock` are torch's own, `packed` are oneDNN's over packed weights, and `native` are draftree's
(`native_linear.py`). `tiled` is an earlier name of `native`.
"""
