"""An OpenAI-compatible server, and the playground page that it serves."""
