"""A LightningModule whose steps run through a pipeline.

    pip install lightning            (pytorch_lightning does as well)
    python tutorials/loops/lightning_loop.py

The module steps by hand (``automatic_optimization = False``), which is Lightning's own way for losses whose backward it does not
call.  The ranks are threads of this process, so Lightning sees one device; its loggers, callbacks and checkpoints work as ever, for
the parameters are the model's own.
"""

from __future__ import annotations

from typing import Any

import torch

import fxchimera

try:
    from lightning.pytorch import LightningModule, Trainer
except ModuleNotFoundError:
    from pytorch_lightning import LightningModule, Trainer

from plain import make_batches, make_model, make_optimizer  # the same small GPT-2 and random tokens


class Piped(LightningModule):
    """A model whose pipeline is made from the first batch's shape."""

    def __init__(self, model: torch.nn.Module, example: torch.Tensor, **options: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.losses = model, []
        self.pipe = fxchimera.pipeline(model, example_kwargs={"input_ids": example, "labels": example}, **options)

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        optimizer = self.optimizers()
        loss = self.pipe.step(input_ids=tokens, labels=tokens)
        self.pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, tokens: torch.Tensor, _: int) -> None:
        self.log("validation", self.pipe.evaluate(input_ids=tokens, labels=tokens))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.pipe.named_parameters())


def train() -> tuple[list[float], float, dict[str, torch.Tensor]]:
    batches = make_batches(4)
    module = Piped(make_model(), batches[0], num_stages=2, n_microbatches=4)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    loaders = (torch.utils.data.DataLoader(data, batch_size=None) for data in (batches, make_batches(1, seed=1)))
    trainer.fit(module, *loaders)
    module.pipe.close()
    return module.losses, float(trainer.callback_metrics["validation"]), module.model.state_dict()


if __name__ == "__main__":
    losses, validation, _ = train()
    print("losses", *(f"{loss:.4f}" for loss in losses), f"validation {validation:.4f}")
