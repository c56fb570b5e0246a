"""A Llama of transformers on a 2 x 2 mesh: two stages, each over two ranks by FSDP2 or tensor parallelism.

    torchrun --standalone --nproc-per-node 4 tutorials/tools/sharded_llama.py tp     # or dp

The function handed to ``parallelize=`` is what users of torchtitan call ``parallelize_fn``: it changes the blocks of one stage in
place, over the mesh's other dimension.  At the end every gradient is compared with the plain model's.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import fxchimera

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().train()


def blocks_of(stage_module: nn.Module) -> list[nn.Module]:
    """The decoder layers that this stage has, under the model's own names."""
    return [module for name, module in stage_module.named_modules() if name.rpartition(".")[0] == "model.layers"]


def shard(stage_module: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2: every block by itself, and what else the stage has."""
    for block in blocks_of(stage_module):
        fully_shard(block, mesh=mesh)
    fully_shard(stage_module, mesh=mesh)


def split(stage_module: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism: heads and hidden units are divided."""
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for block in blocks_of(stage_module):
        parallelize_module(block, mesh, plan)


def main(kind: str, schedule: str) -> float:
    """Make one step; returns the largest error of a gradient of this rank's, relative to its norm."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", kind))
    own = mesh[kind]

    def parallelize(stage_module: nn.Module, *, stage: int, device: torch.device) -> None:
        (shard if kind == "dp" else split)(stage_module, own)

    tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(3))
    mine = tokens.chunk(2)[own.get_local_rank()] if kind == "dp" else tokens  # FSDP2 has a shard of the batch, TP all of it
    plain = build()
    plain(input_ids=tokens, labels=tokens).loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with fxchimera.pipeline(
        build(), example_kwargs={"input_ids": mine, "labels": mine}, num_stages=2, n_microbatches=2, schedule=schedule,
        device_mesh=mesh, parallelize=parallelize,
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.AdamW(pipe.parameters())
        loss = pipe.step(input_ids=mine, labels=mine)
        errors = []
        for name, parameter in pipe.named_parameters():
            gradient, wanted = parameter.grad, expected[name]
            assert gradient is not None
            assert wanted is not None
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            errors.append(float((whole - wanted).norm() / wanted.norm()))
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        state = pipe.state_dict()  # whole tensors under the model's own names, on rank 0 of each pipeline
    print(
        f"rank {dist.get_rank()}: loss {loss:.6f}, norm {norm:.6f}, largest error {max(errors):.1e}, state of {len(state)} tensors"
    )
    dist.destroy_process_group()
    return max(errors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["dp", "tp"])
    parser.add_argument("--schedule", default="1f1b")
    options = parser.parse_args()
    assert main(options.kind, options.schedule) < 1e-9
