"""Drafters that look up text, and their indexes."""
