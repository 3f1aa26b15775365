"""Costs of passes and draft steps: measured curves, and how running steps correct them."""
