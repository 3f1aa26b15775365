"""Layers with a recurrent state (SSM, linear attention) in draft trees.

Attention layers store an entry for each token, so the branches of a tree are stored next to each
other. A recurrent state holds one text. The files here keep the same contract as the cache of keys
and values: `States` holds what is committed, a pass stores what each path would add to it, and a
commit adds the accepted path.

| file | content |
|---|---|
| `state_cache.py` | the interface: `States` (begin, keep, mark, back) of a cache, `Pass` of a forward pass |
| `token_ancestors.py` | `TreePaths`: the ancestors of each token of a pass |
| `recurrences.py` | the recurrences along a tree: gated delta rule, Mamba-2, Mamba-1, convolution |
| `replaced_functions.py` | transformers' functions of such layers, replaced in passes over trees |
| `cache_probe.py` | the states that a model keeps, found by a pass over one token |

Outside the package, `SlotCache` uses `States` and its `Pass`, and `HFRunner` uses
`dispatch_functions`, `use_functions` and `ShapeRecorder`, whichever family the model is of.
"""
