"""A ``Pipe``, as ``torch.distributed.pipelining.pipeline()`` makes it, as a plain module that can be cut where torch cut it.

torch gives every stage that reads a tied parameter a copy of its own, and never adds their gradients; here they are one again.
What the last stage returns is what the loss gets, as under torch's schedules; a ``Pipe`` that is called puts it into a tuple.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx, nn
from torch.distributed.pipelining import Pipe

from fxchimera.errors import FxChimeraError

__all__ = ["stages_of", "whole_model"]


def stages_of(pipe: Pipe) -> tuple[str, ...]:
    """The names of the stages in :func:`whole_model`."""
    return tuple(str(node.target) for node in pipe.split_gm.graph.nodes if node.op == "call_module")


def whole_model(pipe: Pipe) -> nn.Module:
    """A module that calls the stages of ``pipe``, its own objects, one after the other.

    Raises:
        FxChimeraError: The pipe was made with a loss, so that it holds its own backward, or copies of a tied parameter differ.
    """
    if pipe.has_loss_and_backward:
        raise FxChimeraError(
            "the Pipe was traced with a loss and computes its own backward; make it by torch.distributed.pipelining.pipeline(), "
            "and pass loss_fn= here"
        )
    graph = fx.Graph()
    output = graph.graph_copy(pipe.split_gm.graph, {})
    alone = isinstance(output, tuple) and len(output) == 1 and isinstance(output[0], fx.Node) and output[0].op == "call_module"
    graph.output(output[0] if alone else output)  # type: ignore[index]
    model = fx.GraphModule(pipe.split_gm, graph, class_name="Pipe")
    for names in _tied(pipe):
        _tie(model, names)
    return model


def _tied(pipe: Pipe) -> Iterable[list[str]]:
    """Groups of parameters that were one in the traced model: one name in several stages, or what torch says that it copied."""
    group_of: dict[str, list[str]] = {}
    known = [[f"{stage}.{name}" for stage, name in copies.items()] for copies in pipe.replicated_params]
    places: dict[str, list[str]] = {}
    for stage in stages_of(pipe):
        for name, _ in pipe.split_gm.get_submodule(stage).named_parameters(remove_duplicate=False):
            places.setdefault(name, []).append(f"{stage}.{name}")
    for names in [*known, *places.values()]:
        merged = list(dict.fromkeys(other for name in names for other in group_of.get(name, [name])))
        group_of.update(dict.fromkeys(merged, merged))
    return {id(group): group for group in group_of.values() if len(group) > 1}.values()


def _tie(model: nn.Module, names: list[str]) -> None:
    first = model.get_parameter(names[0])
    for name in names[1:]:
        other = model.get_parameter(name)
        if other is not first and not torch.equal(other, first):
            raise FxChimeraError(
                f"{names[0]!r} and {name!r} were one parameter in the model that torch traced, and differ now: copy one onto the "
                "other"
            )
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, first)
