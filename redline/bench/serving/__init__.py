"""Load generation for any OpenAI-compatible server, over HTTP only, and its reports. Nothing here imports torch."""
