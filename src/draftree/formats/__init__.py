"""Checkpoint layouts of other projects: read when a drafter is opened, written by `export`."""
