"""One batch in, N micro-batches out, and their outputs merged again.

Tensors whose first dimension is the batch are divided along it; a chunk spec (torch's ``TensorChunkSpec``, an int dimension, or
None for "give every micro-batch the whole tensor") overrides that guess for one argument.  Everything that is not a tensor is
given to every micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from fxchimera.errors import BatchError
from fxchimera.runtime.settings import frozen
from fxchimera_passes.structure import Structure, flatten

__all__ = [
    "Batch",
    "ChunkSpecs",
    "MicroBatch",
    "describe",
    "device_of",
    "dimensions",
    "divide",
    "merge",
]

Dimension = TensorChunkSpec | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpecs:
    """Where the batch dimension is, for the arguments where "first" is wrong; None as a whole means "first everywhere"."""

    args: Sequence[Dimension] | None = None
    kwargs: Mapping[str, Dimension] | None = None
    target: Dimension = 0


@dataclass(frozen=True, kw_only=True)  # without slots, for what is made when it is first asked for
class MicroBatch:
    """One micro-batch: the tensors of its ``(args, kwargs)`` and of its target, in order, and its number of rows.

    ``index`` is its place in the batch; ``number`` that among the micro-batches of all pipelines, which keys its randomness.
    ``arguments`` is what of ``(args, kwargs)`` is no tensor, to be compared.
    """

    index: int
    number: int
    rows: int
    inputs: tuple[torch.Tensor, ...]
    targets: tuple[torch.Tensor, ...]
    structure: Structure
    target_structure: Structure
    arguments: Hashable

    @functools.cached_property
    def form(self) -> tuple[Any, ...]:
        """Shapes and dtypes of all tensors."""
        return tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*self.inputs, *self.targets))

    @functools.cached_property
    def _call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self.structure.rebuild(self.inputs)
        return args, kwargs

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return self._call[0]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self._call[1]

    @functools.cached_property
    def target(self) -> Any:
        """The target."""
        return self.target_structure.rebuild(self.targets)


@dataclass(frozen=True, slots=True)
class Batch:
    """All micro-batches of a step, in order, the number of rows of the whole batch, and its tensors before they were divided."""

    microbatches: tuple[MicroBatch, ...]
    rows: int
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One tensor of the batch with the name a user knows it by and the dimension to divide (None: give it to everyone)."""

    name: str
    tensor: torch.Tensor
    dim: int | None


def divide(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, n_microbatches: int, specs: ChunkSpecs, *, pipeline: int = 0
) -> Batch:
    """Divide a batch into ``n_microbatches`` whose sizes differ by at most one row (the first ones are the larger).

    ``pipeline`` is the one whose shard this is: its micro-batches are numbered after those of the pipelines before.

    Raises:
        BatchError: Tensors disagree about the number of rows, or there are fewer rows than micro-batches.
    """
    tensors, structure = flatten((args, dict(kwargs)))
    leaves = _leaves(args, kwargs, specs)
    found = [id(leaf.tensor) for leaf in leaves]
    if found != [id(tensor) for tensor in tensors]:
        twice = [leaf.name for leaf in leaves if found.count(id(leaf.tensor)) > 1]
        raise BatchError(
            f"the batch holds the same container twice, so its tensors cannot be told apart by argument ({', '.join(twice)}); "
            "pass each tensor as an argument of its own"
        )
    targets, target_structure = flatten(target)
    target_leaves = [_leaf(_name("target", i, len(targets)), tensor, specs.target) for i, tensor in enumerate(targets)]
    rows = _rows([*leaves, *target_leaves], n_microbatches)
    pieces = [_pieces(leaf, n_microbatches) for leaf in leaves]
    target_pieces = [_pieces(leaf, n_microbatches) for leaf in target_leaves]
    arguments, microbatches = _plain_values(structure), []
    for index in range(n_microbatches):
        inputs, own_targets = tuple(piece[index] for piece in pieces), tuple(piece[index] for piece in target_pieces)
        microbatches.append(
            MicroBatch(
                index=index,
                number=pipeline * n_microbatches + index,
                rows=rows // n_microbatches + (index < rows % n_microbatches),
                inputs=inputs,
                targets=own_targets,
                structure=structure,
                target_structure=target_structure,
                arguments=arguments,
            )
        )
    return Batch(tuple(microbatches), rows, (*tensors, *targets))


def dimensions(args: tuple[Any, ...], kwargs: Mapping[str, Any], specs: ChunkSpecs) -> list[int | None]:
    """Return along which dimension each tensor of a batch is divided, None for one that every micro-batch gets whole."""
    return [leaf.dim for leaf in _leaves(args, kwargs, specs)]


def merge(outputs: Sequence[Any], rows: Sequence[int]) -> Any:
    """Put the outputs of the micro-batches together: rows are concatenated, scalars averaged by rows, equal values kept.

    Raises:
        BatchError: An output tensor neither starts with the micro-batch's rows nor is the same for every micro-batch, or what is
            no tensor differs.
    """
    flat = [flatten(output) for output in outputs]
    if len({describe(structure) for _, structure in flat}) > 1:
        raise BatchError(
            "the outputs of the micro-batches cannot be merged, because a value in them that is no tensor (a number of rows, say) "
            f"differs: {_plain(flat[0])} and {_plain(flat[-1])}. Return tensors whose first dimension is the batch"
        )
    merged = []
    for position in range(flat[0][1].count):
        merged.append(_merge_tensor([tensors[position] for tensors, _ in flat], rows, position))
    return flat[0][1].rebuild(merged)


def device_of(batch: Batch) -> torch.device:
    """Return where a batch is: where its first input tensor is, or the CPU."""
    inputs = batch.microbatches[0].inputs
    return inputs[0].device if inputs else torch.device("cpu")


def describe(structure: Structure) -> str:
    """Return a text of the structure's plain values that is the same in every process."""
    return repr(_plain_values(structure))


def _plain_values(structure: Structure) -> Hashable:
    """What of a structure is no tensor, to be compared."""
    return structure.picture(functools.partial(frozen, seen={}))


def _name(prefix: str, index: int, count: int) -> str:
    return prefix if count == 1 else f"{prefix}[{index}]"


def _leaf(name: str, tensor: torch.Tensor, spec: Dimension) -> _Leaf:
    dim = spec.split_dim if isinstance(spec, TensorChunkSpec) else spec
    if dim is not None and tensor.dim() == 0:
        dim = None
    if dim is not None and not -tensor.dim() <= dim < tensor.dim():
        raise BatchError(f"{name} has {tensor.dim()} dimensions {tuple(tensor.shape)}, but its chunk spec names dimension {dim}")
    return _Leaf(name, tensor, dim)


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any], specs: ChunkSpecs) -> list[_Leaf]:
    if specs.args is not None and len(specs.args) != len(args):
        raise BatchError(f"args_chunk_spec has {len(specs.args)} entries for {len(args)} positional arguments")
    unknown = sorted(set(specs.kwargs or {}) - set(kwargs))
    if unknown:
        raise BatchError(f"kwargs_chunk_spec names {unknown}, but the keyword arguments are {sorted(kwargs)}")
    named: list[tuple[str, Any, Dimension]] = [
        (f"argument {i}", value, specs.args[i] if specs.args is not None else 0) for i, value in enumerate(args)
    ]
    named += [(f"{name}=", value, (specs.kwargs or {}).get(name, 0)) for name, value in kwargs.items()]
    leaves = []
    for name, value, spec in named:
        tensors = [value] if isinstance(value, torch.Tensor) else flatten(value)[0]
        leaves += [_leaf(_name(name, i, len(tensors)), tensor, spec) for i, tensor in enumerate(tensors)]
    return leaves


def _rows(leaves: Sequence[_Leaf], n_microbatches: int) -> int:
    divided = [leaf for leaf in leaves if leaf.dim is not None]
    if not divided:
        raise BatchError("the batch holds no tensor with a batch dimension, so there is nothing to divide into micro-batches")
    sizes = {leaf.name: leaf.tensor.shape[leaf.dim] for leaf in divided if leaf.dim is not None}
    if len(set(sizes.values())) > 1 and n_microbatches > 1:  # one micro-batch is the whole batch, whatever its dimensions mean
        listing = ", ".join(f"{name} {tuple(leaf.tensor.shape)}" for name, leaf in zip(sizes, divided, strict=True))
        raise BatchError(
            f"the tensors of the batch disagree about the number of rows: {listing}. "
            "Name the batch dimension of the odd one with args_chunk_spec=/kwargs_chunk_spec= (TensorChunkSpec(dim), or None "
            "to give the whole tensor to every micro-batch)"
        )
    rows = next(iter(sizes.values()))
    if rows < n_microbatches:
        raise BatchError(
            f"a batch of {rows} rows cannot be divided into n_microbatches={n_microbatches}; "
            f"pass at least {n_microbatches} rows or wrap the model with n_microbatches={max(rows, 1)} or less"
        )
    return rows


def _pieces(leaf: _Leaf, n_microbatches: int) -> Sequence[torch.Tensor]:
    if leaf.dim is None:
        return [leaf.tensor] * n_microbatches
    return torch.tensor_split(leaf.tensor, n_microbatches, dim=leaf.dim)


def _plain(output: tuple[list[torch.Tensor], Structure]) -> Any:
    """An output with shapes in the place of tensors."""
    tensors, structure = output
    return structure.rebuild([torch.empty_like(tensor, device="meta") for tensor in tensors])


def _merge_tensor(pieces: Sequence[torch.Tensor], rows: Sequence[int], position: int) -> torch.Tensor:
    first = pieces[0]
    if first.dim() == 0 and first.is_floating_point():
        total = sum(piece.double() * count for piece, count in zip(pieces, rows, strict=True))
        return (total / sum(rows)).to(first.dtype)  # type: ignore[union-attr]
    if first.dim() and all(piece.shape[0] == count for piece, count in zip(pieces, rows, strict=True)):
        return torch.cat(list(pieces))
    if all(torch.equal(piece, first) for piece in pieces[1:]):
        return first
    shapes = [tuple(piece.shape) for piece in pieces]
    raise BatchError(
        f"output tensor {position} of the micro-batches cannot be merged: shapes {shapes} for {list(rows)} rows, and the values "
        "differ. Return tensors whose first dimension is the batch"
    )
