"""The recorder: one forward of any ``nn.Module``, written down as a ``torch.fx`` graph.

The model runs once on fake tensors.  Calls of closed modules become ``call_module`` nodes that keep the user's own objects; the
few modules that balance needs opened are recorded by the torch functions and modules that they call::

    model(x) --> [module rule | function rule | reads | writes | autograd functions] --> fx.Graph --> Captured
"""

from fxchimera_passes.capture.entry import capture, recapture
from fxchimera_passes.capture.interpret import interpret

__all__ = ["capture", "interpret", "recapture"]
