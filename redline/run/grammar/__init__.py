"""Grammars: which tokens an answer may go on with."""
