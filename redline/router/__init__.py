"""Router: chooses the worker for a job. See docs/routing.md."""
