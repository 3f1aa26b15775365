"""Drafters: they propose candidate tokens."""
