"""The pipeline beside the plain model, and measured."""
