"""Micro-batches: what they count, what their recordings assume, and what a pipeline refuses about them."""
