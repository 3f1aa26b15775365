"""Training of drafters, and the texts that they learn from."""
