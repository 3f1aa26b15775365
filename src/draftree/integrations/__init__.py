"""Integrations: a proposer for vLLM, replicas under Ray Serve. Each is imported on use."""
