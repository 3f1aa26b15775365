"""The runners of forward passes of transformers models, their batches and caches."""
