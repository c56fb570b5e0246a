"""Compiler passes: a module goes in, stage modules come out.

The passes read and write ``torch.fx`` graphs and import neither ``fxchimera`` nor ``torch.distributed``.  Data runs one way:

    capture -> cost -> liveness -> balance -> plan -> split

This package imports nothing on its own, so that ``fxchimera_passes.errors`` stays free of torch for the schedule package.
"""
