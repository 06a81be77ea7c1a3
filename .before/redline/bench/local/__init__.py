"""What is measured inside this process: steps, ops and the quality of answers. May import the engine."""
