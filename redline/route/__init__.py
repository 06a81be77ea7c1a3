"""Which worker takes a job? See docs/route.md."""
