"""Sampling: settings, processors, noise, constraints."""
