"""Layers shared by the model families; they take numbers and a ParallelContext, never a family's config."""
