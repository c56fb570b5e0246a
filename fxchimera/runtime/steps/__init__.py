"""A step: prepared, agreed on, run action by action, and brought to its results."""
