"""The layouts of other projects' checkpoints: read where a drafter is opened, written by `draftree export`."""
