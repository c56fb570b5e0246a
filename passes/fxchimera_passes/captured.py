"""What a capture is: a ``torch.fx`` graph of one forward call, with everything later passes need to know about it.

The graph's leaf modules are the user's own objects and its names are the user's own.  Every node carries a :class:`NodeInfo` in
``node.meta["info"]``; nothing else in ``node.meta`` is read by other passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fxchimera_passes.structure import Structure

__all__ = ["Answer", "Assumption", "CaptureReport", "Captured", "Guard", "Marked", "NodeInfo", "RandomKey", "TensorMeta", "info"]


Answer = bool | int


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, stride (in elements), dtype and whether a gradient flows back through a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Read the meta data of ``tensor`` (fake, meta or real)."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @property
    def bytes(self) -> int:
        """Size of the dense tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RandomKey:
    """Names one random operation of a forward call, whatever the cuts: the ``ordinal``-th of call ``call`` of ``module``."""

    module: str
    call: int
    ordinal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What the recording knows about one node.

    ``value`` is the tensor that the node returns, None when it returns something else (a tuple, an object, a number).
    ``depends`` holds any of "input", "parameter", "buffer", "random": what the value was computed from.  An argument of a module
    call that nothing inside reads or returns (its shape or dtype was enough) does not count.
    ``random`` lists the random operations that run inside the node, in execution order, and before them, under
    ``keyed.HOST_ORDINAL``, a draw from Python's or numpy's global generator.
    ``parameters``/``buffers`` are canonical names read anywhere inside the node (a leaf module's whole subtree).
    ``writes`` are canonical names of buffers that the node writes.
    ``mutates`` are names of the node's argument nodes whose memory it writes (or whose autograd state it sets).
    ``forward_flops``/``moved_bytes`` are analytic: floating-point operations, and bytes read and written by the forward.
    ``autocast`` is None outside autocast regions, else (device type, dtype, enabled).
    ``saved`` are pairs (number of a piece of memory, its bytes) that autograd keeps from the node to its backward, without
    parameters, buffers, inputs and constants; ``memory`` is the number of the memory that ``value`` lies in, -1 for the others.
    ``dear`` are such pairs of what its operators with much arithmetic made (products, convolutions, attention), ``dear_flops`` and
    ``dear_bytes`` their part of ``forward_flops`` and ``moved_bytes``.
    ``hookable`` tells whether it runs under saved-tensor hooks.
    ``line`` is the user's own "file:line" of the call, "" when unknown.
    """

    value: TensorMeta | None = None
    depends: frozenset[str] = frozenset()
    module: str = ""
    grad_enabled: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None
    random: tuple[RandomKey, ...] = ()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    forward_flops: float = 0.0
    moved_bytes: float = 0.0
    saved: tuple[tuple[int, int], ...] = ()
    memory: int = -1
    dear: tuple[tuple[int, int], ...] = ()
    dear_flops: float = 0.0
    dear_bytes: float = 0.0
    hookable: bool = True
    line: str = ""

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps from the node to its backward; what another node keeps too counts for both."""
        return sum(size for _, size in self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A value that the recording read into Python and that depends on the inputs, and on keyed randomness, only.

    ``evaluate(inputs)`` computes it again from real input tensors (in placeholder order); the recording holds for a batch
    iff the result equals ``expected``.  What was drawn at random is drawn again, so it must run in
    ``keyed.microbatch_randomness`` of the micro-batch.
    """

    description: str
    line: str
    expected: Any
    evaluate: Callable[[tuple[torch.Tensor, ...]], Any]

    def holds(self, inputs: tuple[torch.Tensor, ...]) -> bool:
        """Tell whether ``inputs`` would take the same path through the user's Python code."""
        return bool(self.evaluate(inputs) == self.expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """The ``ordinal``-th value read into Python that depends on parameters: the recording took ``answer``, which a node checks."""

    ordinal: int
    description: str
    line: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class Marked:
    """A place in the graph that the user's forward marked as a cut: before ``node`` ("": after all), by a call at ``line``.

    Where it lies inside a module that is one call of the graph, ``hidden`` says in which, and why.
    """

    node: str
    line: str
    hidden: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """Why the capture looks as it does; printed to the user when something goes wrong.

    ``opened``/``closed`` map a module's qualified name to the reason.  ``stateful`` maps a module whose forward changed Python
    attributes to those attributes' names, ``carried`` to those with tensors that a forward reads before it sets them (what the last
    forward left there), ``attached`` to those of them whose tensors require a gradient.  ``notes`` are single sentences.
    """

    opened: Mapping[str, str] = field(default_factory=dict)
    closed: Mapping[str, str] = field(default_factory=dict)
    stateful: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    carried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attached: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def _nothing() -> None:
    """Install nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One forward call of ``model`` as an fx graph.

    The graph has one placeholder per input tensor, named ``input_0``, ``input_1``, ... in the order of ``in_structure`` (the
    structure of ``(args, kwargs)``); its output node returns the tuple of the output's tensors in the order of
    ``out_structure``.  ``call_module`` and ``get_attr`` targets are qualified names on ``model``, or keys of ``constants``.
    Nodes ``pinned[i][0]..pinned[i][1]`` (positions in graph order, inclusive) must stay in one stage.
    ``parameters`` maps every canonical parameter name of the model (as ``model.named_parameters()`` gives it) to all its names.
    ``open_modules`` are the qualified names of modules recorded by their inner calls ("" is the model itself).
    ``device`` is where the recording's tensors live; a ``torch.device`` argument in the graph means it.
    ``grad_enabled`` is the grad mode that the forward began in: a node of the other mode set it itself.
    Without ``cache`` the model's key-value caches were switched off in evaluation too.
    ``host_keys`` are the calls of opened modules that draw from Python's or numpy's generator: the recording holds for these draws.
    ``assumed`` are the answers that the recording took where the forward reads a value that depends on parameters, in the order of
    the reads.  ``beside`` maps a parameter that only other answers lead to, as far as they were tried, to one that is read next to
    it there.  ``install`` does what the model does on its first call: hooks, and flags that say so.
    ``marks`` are the split markers that ran, in order.
    """

    graph: fx.Graph
    model: nn.Module
    constants: Mapping[str, Any]
    in_structure: Structure
    out_structure: Structure
    pinned: tuple[tuple[int, int], ...]
    parameters: Mapping[str, tuple[str, ...]]
    open_modules: frozenset[str]
    guards: tuple[Guard, ...]
    report: CaptureReport
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grad_enabled: bool = True
    host_keys: tuple[RandomKey, ...] = ()
    cache: bool = True
    assumed: tuple[Assumption, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    install: Callable[[], None] = _nothing
    marks: tuple[Marked, ...] = ()


_NOTHING = NodeInfo()


def info(node: fx.Node) -> NodeInfo:
    """Return what the recording knows about ``node``; the output node, which computes nothing, has an empty record."""
    found: NodeInfo = _NOTHING if node.op == "output" and "info" not in node.meta else node.meta["info"]
    return found
