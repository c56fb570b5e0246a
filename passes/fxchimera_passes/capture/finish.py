"""Turns a finished recording into a :class:`Captured`: dead nodes leave, pinned ranges get their final positions."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from fxchimera_passes.capture.marks import surviving_marks
from fxchimera_passes.capture.recorder import Recorder
from fxchimera_passes.capture.snapshots import snapshot_buffers
from fxchimera_passes.captured import Captured, CaptureReport, info
from fxchimera_passes.structure import Structure

__all__ = ["finish"]


def finish(
    recorder: Recorder,
    model: nn.Module,
    structures: tuple[Structure, Structure],
    parameters: Mapping[str, tuple[str, ...]],
    report: CaptureReport,
) -> Captured:
    """Clean the graph of ``recorder`` and describe it."""
    writer = recorder.writer
    _eliminate(writer.graph, writer.keep_alive)
    writer.empty_again()
    treated = snapshot_buffers(writer, grad_enabled=recorder.grad_enabled)
    writer.pins += [(writer.order[alias], end) for alias, end in writer.stale if writer.storage.get(alias) not in treated]
    nodes = [node for node in writer.graph.nodes if node.op != "output"]
    positions = [writer.order[node] for node in nodes]
    ranges = _surviving(writer.pins, positions)
    ranges += _objects(nodes) + _buffers(nodes)
    writer.graph.lint()
    return Captured(
        graph=writer.graph,
        model=model,
        constants=writer.constants,
        in_structure=structures[0],
        out_structure=structures[1],
        pinned=_merged(ranges),
        parameters=parameters,
        open_modules=frozenset(recorder.entered),
        guards=tuple(recorder.reads.guards),
        report=report,
        device=recorder.device,
        grad_enabled=recorder.grad_enabled,
        host_keys=tuple(recorder.host_keys),
        marks=surviving_marks(recorder.marks, positions, [node.name for node in nodes], model, report.closed),
    )


def _eliminate(graph: fx.Graph, keep: set[fx.Node]) -> None:
    for node in reversed(graph.nodes):
        if not node.users and node not in keep and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def _surviving(pins: list[tuple[int, int]], positions: list[int]) -> list[tuple[int, int]]:
    """Translate ranges of recording positions into ranges of the nodes that are left (``positions`` ascending)."""
    found = []
    for first, last in pins:
        inside = [index for index, position in enumerate(positions) if first <= position <= last]
        if len(inside) > 1:
            found.append((inside[0], inside[-1]))
    return found


def _objects(nodes: list[fx.Node]) -> list[tuple[int, int]]:
    """Only tensors cross a cut: a node that returns anything else stays with all its readers."""
    position = {node: index for index, node in enumerate(nodes)}
    return [
        (index, max(position.get(user, index) for user in node.users))
        for index, node in enumerate(nodes)
        if node.users and info(node).value is None and node.op not in ("placeholder", "get_attr")
    ]


def _buffers(nodes: list[fx.Node]) -> list[tuple[int, int]]:
    """Everything that touches a buffer which some node writes stays together, unless that is one call."""
    written = {name for node in nodes for name in info(node).writes}
    ranges = []
    for name in written:
        touching = [index for index, node in enumerate(nodes) if name in info(node).writes or name in info(node).buffers]
        ranges.append((touching[0], touching[-1]))
    return ranges


def _merged(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if last <= first:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)
