"""The Trainer of transformers, with a pipeline under it: one method is overridden.

    pip install accelerate            which Trainer needs
    python tutorials/loops/hf_trainer.py

The ranks are threads of this process, each on a device of its own where there are several.  Then the parameters of the pipeline are
the model's own objects: Trainer's optimizer, its schedule, its clipping, its callbacks, ``evaluate``, ``save_model`` and its
checkpoints work on them and need not know.  Under torchrun Trainer would take the processes for data-parallel ones, give each
another part of every batch and wrap the model in DistributedDataParallel; there use the loop of ``plain.py``.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from plain import make_batches, make_model  # the same small GPT-2 and random tokens
from transformers import Trainer, TrainingArguments

import fxchimera


class PipelineTrainer(Trainer):
    """Trainer whose steps run through a pipeline; ``pipeline`` holds the options of ``fxchimera.pipeline``."""

    def __init__(self, *args: Any, pipeline: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.world_size > 1:
            raise ValueError("start PipelineTrainer without torchrun: Trainer takes processes for data-parallel ones")
        self.args._n_gpu = 1  # the devices are the pipeline's, not DataParallel's
        example = self._counted(next(iter(self.get_train_dataloader())), torch.tensor(1))
        weight = "sum" if self.model_accepts_loss_kwargs else "samples"  # the model divides by Trainer's count of labels itself
        self.pipe = fxchimera.pipeline(self.model, example_kwargs=example, loss_weight=weight, **pipeline)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward; ``.grad`` of the model's parameters has grown by the gradient when it returns."""
        model.train()
        scale = 1.0 if self.model_accepts_loss_kwargs else 1.0 / self.current_gradient_accumulation_steps
        return self.pipe.step(**self._counted(inputs, num_items_in_batch), loss_scale=scale) * scale

    def _counted(self, inputs: dict[str, Any], count: Any) -> dict[str, Any]:
        """The model's arguments, with the number of labels of an update where Trainer would pass it."""
        inputs = dict(self._prepare_inputs(inputs))
        return inputs | {"num_items_in_batch": torch.as_tensor(count)} if self.model_accepts_loss_kwargs else inputs


def make_arguments(folder: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder, max_steps=3, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=1e-2,
        max_grad_norm=1.0, weight_decay=0.1, logging_steps=1, report_to=[], use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip


def make_rows(batches: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens; the labels of the first ones, more or fewer, do not count."""
    rows = [row for batch in make_batches(batches, seed) for row in batch]
    return [{"input_ids": row, "labels": torch.where(torch.arange(16) < number % 7, -100, row)} for number, row in enumerate(rows)]


def train(folder: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    pipeline = {"num_stages": 2, "n_microbatches": 4}
    data = {"train_dataset": make_rows(6, 0), "eval_dataset": make_rows(1, 1)}
    trainer = PipelineTrainer(make_model(), make_arguments(folder), pipeline=pipeline, **data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    validation = trainer.evaluate()["eval_loss"]
    trainer.save_model(folder)  # as ever: the model's own names
    trainer.pipe.close()
    return losses, validation, trainer.model.state_dict()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses, validation, _ = train(folder)
    print("losses", *(f"{loss:.4f}" for loss in losses), f"validation {validation:.4f}")
