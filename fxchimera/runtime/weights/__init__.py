"""The model's tensors: from meta to values, on their devices, sharded by the user, saved and loaded."""
