"""draftree inside other programs: a proposer for vLLM, replicas under Ray Serve. Each is imported where it is used."""
