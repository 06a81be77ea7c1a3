"""A load on anybody's OpenAI server, over HTTP alone, and what it shows. Nothing here reaches torch."""
