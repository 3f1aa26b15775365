"""Models of transformers and the runners of their passes."""
