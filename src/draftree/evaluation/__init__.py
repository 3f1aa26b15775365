"""Benchmarks, replays and analyses."""
