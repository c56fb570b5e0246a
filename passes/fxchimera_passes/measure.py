"""Time every node of a recorded graph on real tensors, forward and backward apart, and leave no trace in the model.

Each node runs as a piece of its own: its inputs are cut off from the rest of autograd, exactly as a stage's are.  Backward times
matter as much as forward ones (a loss over a large vocabulary is cheap forward and dear backward), and no formula knows them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxchimera_passes.analytic import NodeCosts, backward_factors
from fxchimera_passes.assumed import collecting
from fxchimera_passes.capture.state import generators_untouched
from fxchimera_passes.capture.targets import reached
from fxchimera_passes.captured import Captured, info
from fxchimera_passes.errors import CaptureError
from fxchimera_passes.inplace import written
from fxchimera_passes.plan import Stage
from fxchimera_passes.scope import Scope, call_in_scope
from fxchimera_passes.structure import Structure, flatten
from fxchimera_passes.whole import module_at

__all__ = ["measured", "measured_stage"]


def measured(captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any], *, repeats: int = 3) -> NodeCosts:
    """Run the recorded forward node by node and return the median seconds of each node's forward and backward.

    ``args`` and ``kwargs`` are one batch of the recorded structure, on the model's device.  Buffers, random generators and the
    attributes that the recording saw changing are put back; gradients are never touched.

    Raises:
        CaptureError: ``repeats`` is not positive, or the batch holds another number of tensors than the recorded one.
    """
    tensors, _ = flatten((tuple(args), dict(kwargs)))
    if repeats < 1:
        raise CaptureError(f"repeats must be at least 1, got {repeats}")
    expected = sum(node.op == "placeholder" for node in captured.graph.nodes)
    if len(tensors) != expected:
        raise CaptureError(
            f"the batch holds {len(tensors)} tensors, the recorded one held {expected}; pass arguments of the same form"
        )
    with _restored(captured), collecting():  # a wrong answer on the way is not of interest
        return _Meter(captured, repeats).run(tensors)


def measured_stage(
    captured: Captured, stage: Stage, received: Sequence[Tensor], inputs: Sequence[Tensor], *, repeats: int = 3
) -> NodeCosts:
    """The same for the nodes of one stage of a cut: ``received`` is what the stage before sends, ``inputs`` are a whole batch's."""
    with _restored(captured), collecting():
        return _Meter(captured, repeats).run_stage(stage, received, inputs)


class _Meter:
    """Runs the nodes in order; ``values`` holds what the later ones still need."""

    def __init__(self, captured: Captured, repeats: int) -> None:
        self.captured, self.repeats = captured, repeats
        self.values: dict[fx.Node, Any] = {}
        self.factors = backward_factors(captured)
        self.forward: dict[str, float] = {}
        self.backward: dict[str, float] = {}
        self.device = captured.device

    def run(self, tensors: Sequence[Tensor]) -> NodeCosts:
        """Time all nodes on these input tensors."""
        return self._run(list(self.captured.graph.nodes), tensors)

    def run_stage(self, stage: Stage, received: Sequence[Tensor], tensors: Sequence[Tensor]) -> NodeCosts:
        """Time the nodes of a stage."""
        self.device = next((tensor.device for tensor in (*received, *tensors)), self.device)
        named = {node.name: node for node in self.captured.graph.nodes}
        for value, tensor in zip(stage.received, received, strict=True):
            self.values[named[value.name]] = tensor.detach().clone().requires_grad_(value.meta.requires_grad)
        own = set(stage.nodes)
        return self._run([n for n in self.captured.graph.nodes if n.name in own or n.op in ("placeholder", "get_attr")], tensors)

    def _run(self, nodes: Sequence[fx.Node], tensors: Sequence[Tensor]) -> NodeCosts:
        arriving = iter(tensors)
        last = {source: node for node in nodes for source in node.all_input_nodes}
        for node in nodes:
            if node.op == "placeholder":
                self.values[node] = next(arriving).detach()
            elif node.op == "get_attr":
                self.values[node] = self._attribute(str(node.target))
            elif node.op != "output":
                self.values[node] = self._timed(node)
            for source in node.all_input_nodes:
                if last[source] is node:
                    self.values.pop(source, None)
        return NodeCosts(self.forward, self.backward)

    def _attribute(self, name: str) -> Any:
        if name in self.captured.constants:
            value = self.captured.constants[name]
            return value.to(self.device) if isinstance(value, Tensor) else value
        path, _, last = name.rpartition(".")
        return getattr(self.captured.model.get_submodule(path), last)

    def _given(self, argument: Any) -> Any:
        """The value of a node's argument, in lists and dicts of Python's own: those of a graph cannot be rebuilt."""
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, (tuple, list)):
            return (tuple if isinstance(argument, tuple) else list)(self._given(part) for part in argument)
        if isinstance(argument, dict):
            return {key: self._given(part) for key, part in argument.items()}
        if isinstance(argument, slice):
            return slice(self._given(argument.start), self._given(argument.stop), self._given(argument.step))
        if isinstance(argument, torch.device) and argument.type == self.captured.device.type:
            return self.device
        return argument

    def _timed(self, node: fx.Node) -> Any:
        args, kwargs = self._given(node.args), self._given(node.kwargs)
        tensors, structure = flatten((args, kwargs))
        writes = bool(written(node))
        runs = [self._once(node, tensors, structure, writes) for _ in range(self.repeats)]
        self.forward[node.name] = statistics.median(forward for forward, _, _ in runs)
        self.backward[node.name] = statistics.median(backward for _, backward, _ in runs)
        outputs, form = flatten(runs[-1][2])
        needs = [output.requires_grad for output in outputs]
        if writes or _fills(node):  # the timed runs changed copies; this one makes the change that later nodes read
            grad = not writes and info(node).grad_enabled
            outputs, form = flatten(self._call(node, args, kwargs, Scope(grad, info(node).autocast)))
        return form.rebuild([output.detach().requires_grad_(need) for output, need in zip(outputs, needs, strict=True)])

    def _once(self, node: fx.Node, tensors: Sequence[Tensor], structure: Structure, writes: bool) -> tuple[float, float, Any]:
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        args, kwargs = structure.rebuild([leaf.clone() for leaf in leaves] if writes else leaves)
        scope = Scope(info(node).grad_enabled, info(node).autocast)
        forward, result = _clocked(lambda: self._call(node, args, kwargs, scope))
        outputs = [output for output in flatten(result)[0] if output.requires_grad]
        owned = [self.captured.model.get_parameter(name) for name in info(node).parameters]
        wanted = [tensor for tensor in (*leaves, *owned) if tensor.requires_grad]
        if not outputs or not wanted:
            return forward, 0.0, result
        ones = [torch.ones_like(output) for output in outputs]
        try:
            backward, _ = _clocked(lambda: torch.autograd.grad(outputs, wanted, ones, allow_unused=True))
        except RuntimeError:  # reentrant checkpointing works in .backward() alone, which would touch the user's gradients
            backward = self.factors[node.name] * forward
        return forward, backward, result

    def _call(self, node: fx.Node, args: Any, kwargs: Any, scope: Scope) -> Any:
        function: Any = node.target
        if node.op == "call_module":
            function = module_at(self.captured.model, str(node.target))
        elif node.op == "call_method":
            function = getattr(torch.Tensor, str(node.target))
        return call_in_scope(scope, function, *args, **kwargs)


def _fills(node: fx.Node) -> bool:
    """Whether a later node reads a tensor out of a container that this one is given and fills."""
    return any(user.target is reached and user.args[-1] is node for user in node.users)


def _clocked(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that ``function`` takes on the device it runs on, and its result."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    began = time.perf_counter()
    result = function()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - began, result


@contextmanager
def _restored(captured: Captured) -> Iterator[None]:
    """Put buffers (values and objects), recorded Python attributes and random generators back."""
    buffers = [(module, name, buffer) for module in captured.model.modules() for name, buffer in module._buffers.items()]
    copies = [None if buffer is None else buffer.detach().clone() for _, _, buffer in buffers]
    modules = [(captured.model.get_submodule(path), names) for path, names in captured.report.stateful.items()]
    attributes = [(module, name, module.__dict__[name]) for module, names in modules for name in names if name in module.__dict__]
    with ExitStack() as stack:
        stack.enter_context(generators_untouched())
        stack.enter_context(_device_generators_untouched(captured.model))
        try:
            yield
        finally:
            for (module, name, buffer), copy in zip(buffers, copies, strict=True):
                module._buffers[name] = buffer
                if buffer is not None and copy is not None:
                    with torch.no_grad():
                        buffer.copy_(copy)
            for module, name, value in attributes:
                module.__dict__[name] = value


@contextmanager
def _device_generators_untouched(model: nn.Module) -> Iterator[None]:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in devices}
    with ExitStack() as stack:
        for kind in sorted(kinds):
            indices = sorted({device.index or 0 for device in devices if device.type == kind})
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        yield
