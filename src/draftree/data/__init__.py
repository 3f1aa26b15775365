"""Data for training and evaluation: rows, prompts, samples, overlap with evaluation suites."""
