"""Tries every causal-LM type of the installed transformers and writes docs/models.md."""
