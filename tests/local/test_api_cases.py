"""Public bug reports about pipelines, as small cases: each step must equal the plain model's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.local.toys import WIDTH, Tanh, chain, data, plain, seeded, wrapped
from tests.local.wrapped import step, wrap
from tests.models import MODELS
from tests.parity import Outcome, assert_close, assert_same_tensors, gradients_of, micro_batch_loop

CHIMERA_AND_1F1B = pytest.mark.parametrize("schedule", ["chimera", "1f1b"])


# ---------------------------------------------------------------------- sizes


@CHIMERA_AND_1F1B
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_any_number_of_micro_batches(n: int, schedule: str) -> None:
    """P02: fewer than stages, not a multiple of them, odd."""
    x, y = data(5)
    expected = plain(chain(8), lambda model: F.mse_loss(model(x), y))
    model = chain(8)
    with wrapped(model, x, num_stages=4, n_microbatches=n, schedule=schedule) as pipe:
        assert_close(Outcome(pipe.step(x, target=y), gradients_of(model)), expected, 1e-12)


def test_sequence_lengths_that_change() -> None:
    """P04: tokens of length 8, 12, then 8 again; and another number of rows."""
    expected, model = MODELS["tied"](dtype=torch.float64), MODELS["tied"](dtype=torch.float64).model
    generator = torch.Generator().manual_seed(1)
    with wrap(expected._replace(model=model), 2, 4) as pipe:
        for rows, length in ((4, 8), (4, 12), (4, 8), (9, 5)):
            ids, target = (torch.randint(1, 48, (rows, length), generator=generator) for _ in range(2))
            model.zero_grad()
            expected.model.zero_grad()
            found = Outcome(pipe.step(ids, target=target), gradients_of(model))
            wanted = plain(expected.model, lambda m, i=ids, t=target: F.cross_entropy(m(i).flatten(0, 1), t.flatten()))
            assert_close(found, wanted, 1e-12)


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        halves = torch.tanh(self.first(x)).view(x.shape[0] * 2, -1)
        return self.third(torch.tanh(self.second(halves.view(x.shape[0], -1))))


def test_a_batch_size_read_in_the_forward() -> None:
    """P17: recorded at micro-batches of 2, trained with micro-batches of 3 and 5."""
    example, _ = data(4)
    model = seeded(Reshaped)
    with wrapped(model, example, num_stages=2, n_microbatches=2) as pipe:
        for rows in (6, 10):
            x, y = data(rows)
            model.zero_grad()
            expected = plain(seeded(Reshaped), lambda m, x=x, y=y: F.mse_loss(m(x), y))
            assert_close(Outcome(pipe.step(x, target=y), gradients_of(model)), expected, 1e-12)


# ---------------------------------------------------------------------- gradients over steps


@CHIMERA_AND_1F1B
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_accumulation_is_a_sum(steps: int, schedule: str) -> None:
    """P05."""
    batches = [data(5, seed=seed) for seed in range(steps)]
    reference = chain(4)
    for x, y in batches:
        expected = plain(reference, lambda model, x=x, y=y: F.mse_loss(model(x), y))
    model = chain(4)
    with wrapped(model, batches[0][0], num_stages=2, n_microbatches=4, schedule=schedule) as pipe:
        for x, y in batches:
            loss = pipe.step(x, target=y)
    assert_close(Outcome(loss, gradients_of(model)), expected, 1e-12)


@CHIMERA_AND_1F1B
@pytest.mark.parametrize("name", ["tied", "resnet"])
def test_gradients_under_no_sync_arrive_with_the_next_exchange(name: str, schedule: str) -> None:
    """The sum of all steps, the earlier gradients included; batch norm's statistics wait too, and come in order."""
    example, reference = (MODELS[name](dtype=torch.float64, batch=9) for _ in range(2))
    with wrap(example, 4, 4, schedule) as pipe:
        earlier = step(pipe, example)
        with pipe.no_sync():
            for _ in range(2):
                assert_same_tensors(step(pipe, example).gradients, earlier.gradients)
            pipe.evaluate(*example.args, target=example.target)
        found = step(pipe, example)
    for _ in range(4):
        expected = micro_batch_loop(reference, 4)
    assert_close(found, expected, 1e-12)
    torch.testing.assert_close(example.model.state_dict(), reference.model.state_dict(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("share", [0.3, 3.0])
def test_clipping_is_by_the_global_norm(share: float, norm_type: float) -> None:
    """P07: stages whose norms differ by 100 times; each parameter is counted once."""
    x, y = data(8)

    def build() -> nn.Module:
        model = chain(4)
        with torch.no_grad():
            model[3].linear.weight.mul_(0.01)
        return model

    reference, model = build(), build()
    expected = plain(reference, lambda m: F.mse_loss(m(x), y))
    max_norm = share * float(nn.utils.get_total_norm([p.grad for p in reference.parameters()], norm_type))
    norm = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    with wrapped(model, x, num_stages=4, n_microbatches=4) as pipe:
        pipe.step(x, target=y)
        found = pipe.clip_grad_norm_(max_norm, norm_type)
    torch.testing.assert_close(found.double(), norm.double(), rtol=1e-6, atol=0.0)
    assert_close(Outcome(expected.loss, gradients_of(model)), Outcome(expected.loss, gradients_of(reference)), 1e-12)


@CHIMERA_AND_1F1B
@pytest.mark.parametrize("stages", [2, 4])
def test_tied_weights_stay_tied(stages: int, schedule: str) -> None:
    """P09: ten AdamW steps; the state dict has the tie."""
    example, reference = (MODELS["tied"](dtype=torch.float64, batch=6) for _ in range(2))
    optimizer_of = torch.optim.AdamW(reference.model.parameters(), lr=1e-2)
    with wrap(example, stages, 4, schedule) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            optimizer_of.zero_grad()
            step(pipe, example)
            reference.loss(reference.model(*reference.args)).backward()
            optimizer.step()
            optimizer_of.step()
        state = pipe.state_dict()
    assert torch.equal(state["embed.weight"], state["head.weight"])
    assert example.model.embed.weight is example.model.head.weight
    torch.testing.assert_close(state, dict(reference.model.state_dict()), rtol=0.0, atol=1e-9)


# ---------------------------------------------------------------------- what crosses the cuts


class Crossing(nn.Module):
    """Integers, booleans, a float without gradient and a table, each read in every block."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Tanh() for _ in range(4))
        self.register_buffer("freqs", torch.arange(WIDTH) / WIDTH, persistent=persistent)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        scale = x.detach().abs().mean(-1, keepdim=True)  # P12
        positions = ids.cumsum(1) % 7
        for block in self.blocks:
            x = block(x * self.freqs + positions[..., None]) * mask[..., None] + scale
        return x / scale


@CHIMERA_AND_1F1B
@pytest.mark.parametrize(("stages", "persistent"), [(2, True), (4, False)])
def test_integers_booleans_constants_and_tables(stages: int, persistent: bool, schedule: str) -> None:
    """P10, P11 and P12."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (6, 5), generator=generator)
    mask = torch.rand(6, 5, generator=generator) > 0.3
    expected = plain(seeded(lambda: Crossing(persistent)), lambda m: m(ids, mask).square().mean())
    model = seeded(lambda: Crossing(persistent))
    loss_fn = lambda output: output.square().mean()  # noqa: E731
    with wrapped(model, ids, mask, loss_fn=loss_fn, num_stages=stages, n_microbatches=4, schedule=schedule) as pipe:
        assert_close(Outcome(pipe.step(ids, mask), gradients_of(model)), expected, 1e-12)
        for stage in pipe.plan.stages:
            assert not any(value.name.startswith("freqs") for value in stage.received), "the table must not travel"
            for value in stage.received:
                assert value.meta.requires_grad <= value.meta.dtype.is_floating_point


@CHIMERA_AND_1F1B
@pytest.mark.parametrize("trained", ["first", "last"])
def test_stages_with_nothing_to_train(trained: str, schedule: str) -> None:
    """P14: five steps; frozen parameters keep their bits and have no gradient."""

    def build() -> nn.Sequential:
        model = chain(4)
        model.requires_grad_(False)
        model[0 if trained == "first" else 3].requires_grad_(True)
        return model

    x, y = data(6)
    model, reference, untouched = build(), build(), build().state_dict()
    with wrapped(model, x, num_stages=4, n_microbatches=4, schedule=schedule) as pipe:
        optimizers = [torch.optim.SGD(pipe.parameters(), 0.1), torch.optim.SGD(reference.parameters(), 0.1)]
        for _ in range(5):
            model.zero_grad()
            reference.zero_grad()
            found = Outcome(pipe.step(x, target=y), gradients_of(model))
            assert_close(found, plain(reference, lambda m: F.mse_loss(m(x), y)), 1e-12)
            for optimizer in optimizers:
                optimizer.step()
        sent_back = sum(value.meta.requires_grad for stage in pipe.plan.stages for value in stage.sent)
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 6
    assert_same_tensors({k: p.detach() for k, p in frozen.items()}, {k: untouched[k] for k in frozen})
    assert trained == "first" or sent_back == 0, "nothing may flow back to stages that need nothing"


@CHIMERA_AND_1F1B
def test_requires_grad_may_change_after_wrapping(schedule: str) -> None:
    x, y = data(6)
    model, reference = chain(4), chain(4)
    with wrapped(model, x, num_stages=4, n_microbatches=4, schedule=schedule) as pipe:
        for frozen in ((), (0, 2), (3,), ()):
            for m in (model, reference):
                m.zero_grad()
                for index, layer in enumerate(m):
                    layer.requires_grad_(index not in frozen)
            found = Outcome(pipe.step(x, target=y), gradients_of(model))
            assert_close(found, plain(reference, lambda m: F.mse_loss(m(x), y)), 1e-12)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mixing", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sparse.mm(self.mixing, torch.tanh(self.first(x)).t()).t())


def test_a_sparse_buffer() -> None:
    """The plan counts its bytes, and it stays where it is."""
    x, y = data(4)
    expected, model = plain(seeded(Sparse), lambda m: F.mse_loss(m(x), y)), seeded(Sparse)
    with wrapped(model, x, num_stages=2, n_microbatches=1, schedule="1f1b") as pipe:
        assert_close(Outcome(pipe.step(x, target=y), gradients_of(model)), expected, 1e-12)
