"""The training loop: batches, steps, synchronisation between ranks, averages, states. It depends on accelerate, but not
on the backend: one process, data parallel, fully sharded or ZeRO.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from redline import clock
from redline.draft.train import batches, blocks, losses, train_state, ttt
from redline.draft.train.batches import PrefetchIterator, Source, TrainBatch, TrainSequence
from redline.draft.train.budget import Reached, TrainBudget, is_agreement, rate
from redline.draft.train.losses import DrafterMetrics, Kind, Stats, measured
from redline.draft.train.muon import Muon
from redline.messages.base import Record
from redline.model.block.module import BlockDrafter
from redline.model.drafter import Drafter
from redline.model.eagle3.module import Eagle3

Line = dict[str, Any]


class Recipe(Record, frozen=True):
    """Hyperparameters of a training. Shares refer to the budget."""

    budget: TrainBudget
    tokens_per_batch: int = 32768
    """Rows of one optimiser step, padding included, over all ranks."""
    accumulate: int = 1
    """Number of batches per step, on each rank."""
    max_length: int = 4096
    """Longer sequences are truncated."""
    pool: int = 16
    """Number of batches that are filled from one pool of sequences, sorted by length."""
    lr: float = 1e-3
    warmup: float = 0.02
    clip: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    ema: float = 0.999
    l2_sp: float = 0.0
    """Weight of the squared distance to the initial weights."""
    steps_ahead: int = 7
    """Number of steps of training-time test."""
    step_decay: float = 0.8
    loss: Kind = "kl"
    lk_decay: float = 3.0
    anchors: int = 64
    """Blocks of each sequence and step, of a block drafter."""
    block_decay: float = 4.0
    """d: the j-th draft of a block has the weight exp(-j / d)."""
    focus: float = 0.0
    """c: tokens are weighted by 1 + c gap within their sequence."""
    seed: int = 1
    log_every: int = 20
    measure_every: int = 500
    keep_every: int = 500
    held_out: float = 0.02
    """Share of sequences that are never trained on."""
    held_out_tokens: int = 65536
    """Maximum number of held-out tokens that are measured."""
    compile: bool = False


class Trainee(nn.Module):
    """A drafter with a forward that returns the loss, as data-parallel wrappers need."""

    def __init__(self, drafter: Eagle3, recipe: Recipe, way: ttt.Way) -> None:
        super().__init__()
        self.drafter = drafter
        self.recipe = recipe
        self.way: ttt.Way = way
        self.steps = recipe.steps_ahead
        self.step_weights = [recipe.step_decay**step for step in range(self.steps)]
        self.figures: Any = None
        self.begin = [p.detach().clone() for p in drafter.parameters()] if recipe.l2_sp else []

    def forward(self, batch: TrainBatch, head_VD: Tensor) -> tuple[Tensor, Tensor, Stats]:
        """(sum over the batch's sequences of their losses, L2-SP penalty, statistics). head_VD: the target's head."""
        recipe = self.recipe
        normed = ttt.unroll(self.drafter, batch.tokens, batch.features, recipe.steps_ahead, self.way)
        rows = losses.compare(
            self.drafter, normed, head_VD, batch.targets, recipe.loss, recipe.lk_decay, compiled=self.figures
        )
        total = losses.per_sequence(rows, batch.targets, batch.sequences, self.step_weights, recipe.focus).sum()
        penalty = recipe.l2_sp * _distance(self.drafter, self.begin, total)
        return total, penalty, losses.count(rows, batch.targets, batch.tokens.numel())


class BlockTrainee(nn.Module):
    """The same for a block drafter; a step of the statistics is a draft of the block."""

    def __init__(self, drafter: BlockDrafter, recipe: Recipe) -> None:
        super().__init__()
        self.drafter = drafter
        self.recipe = recipe
        self.steps = drafter.config.drafts
        self.step_weights = [math.exp(-draft / recipe.block_decay) for draft in range(self.steps)]
        self.figures: Any = None
        self.begin = [p.detach().clone() for p in drafter.parameters()] if recipe.l2_sp else []

    def forward(self, batch: TrainBatch, head_VD: Tensor) -> tuple[Tensor, Tensor, Stats]:
        """As `Trainee.forward`."""
        recipe = self.recipe
        total, stats = blocks.block_loss(
            self.drafter, batch, head_VD, recipe.anchors, recipe.block_decay, learning=self.training
        )
        return total, recipe.l2_sp * _distance(self.drafter, self.begin, total), stats


def _distance(drafter: nn.Module, begin: Sequence[Tensor], like: Tensor) -> Tensor:
    """The squared distance of the parameters from `begin`; 0 if that is empty."""
    penalty = like.new_zeros(())
    for parameter, at in zip(drafter.parameters(), begin, strict=False):
        penalty = penalty + (parameter - at).float().square().sum()
    return penalty


class Average:
    """The moving average of a model's parameters, in float32; the average is measured and saved."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.values = [parameter.detach().float().clone() for parameter in self._parameters]
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the weights after step `step`, counted from 1.

        In the first steps the average is over fewer steps than its decay implies.
        """
        decay = min(self._decay, step / (step + 9))
        for value, parameter in zip(self.values, self._parameters, strict=True):
            value.lerp_(parameter.detach().float(), 1 - decay)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Context manager: the model has the averaged weights inside, and its own weights again afterwards."""
        kept = [parameter.detach().clone() for parameter in self._parameters]
        self._copy(self.values)
        try:
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)


class Trainer:
    """One training. Set `asked` to request its end; `stopped` is set once all ranks know of the request.

    drafter  float32, on the accelerator's device, with the target's embedding and head attached
    head_VD  the target's head
    reached  progress that all ranks agreed on: steps, tokens, seconds
    """

    def __init__(self, accelerator: Any, drafter: Drafter, head_VD: Tensor, source: Source, recipe: Recipe) -> None:
        self.accelerator, self.recipe, self._source = accelerator, recipe, source
        self._head_VD = head_VD
        self.device: torch.device = accelerator.device
        if isinstance(drafter, BlockDrafter):
            self.way, self.why = "of blocks", "torch's"
            self._trainee = BlockTrainee(drafter, recipe)
        else:
            config = drafter.config
            sizes = config.num_attention_heads, config.query_width, config.value_width
            self.way, self.why = ttt.choose(self.device, *sizes)
            self._trainee = Trainee(drafter, recipe, self.way)
        optimizer = _optimizer(accelerator, drafter, recipe)
        self._model, self._optimizer = accelerator.prepare(self._trainee, optimizer)
        self.average = Average(self._model, recipe.ema)
        self._names = [
            name.removeprefix("drafter.")
            for name, parameter in accelerator.unwrap_model(self._model).named_parameters()
            if parameter.requires_grad
        ]
        self._chunk = losses.chunk_rows(head_VD.shape[0]) if recipe.compile else 1
        if recipe.compile:
            self._trainee.figures = torch.compile(losses.figures, dynamic=False)
        self.step = self.tokens = self._drawn = 0
        self.reached = Reached()
        self._window: Stats | None = None  # statistics since the last line of the log
        self.asked = self.stopped = False
        self.held_out = batches.held_out(
            source, recipe.held_out, recipe.held_out_tokens, recipe.max_length, recipe.seed
        )

    # The loop.

    def train(self, log: Callable[[Line], None], keep: Callable[[], None]) -> None:
        """Trains until the budget is used or the end is requested. `log` gets lines, on every rank; `keep` saves.

        Raises ConfigError if the source has nothing to train on.
        """
        recipe = self.recipe
        ahead = PrefetchIterator(self._batches())
        began = clock.monotonic() - self.reached.seconds
        since = (self.tokens, clock.monotonic())
        try:
            while not self._is_over() and not self.stopped:
                group = list(islice(ahead, recipe.accumulate))
                found, norm = self._first_or_next(group)
                self.step += 1
                self.average.update(self.step)
                self._drawn += recipe.accumulate
                self.tokens += sum(batch.positions for batch in group)
                self._window = found if self._window is None else _added(self._window, found)
                self._agree(began)
                if self.step % recipe.log_every == 0:
                    line = self._line(self._summed(self._window), norm)
                    passed = clock.monotonic() - since[1]
                    log({**line, "tokens_per_s": round((self.reached.tokens - since[0]) / max(passed, 1e-9))})
                    self._window, since = None, (round(self.reached.tokens), clock.monotonic())
                if self.held_out and self.step % recipe.measure_every == 0 and not self._is_over():
                    log({"step": self.step, "tokens": round(self.reached.tokens), **self.measure()})
                if self.step % recipe.keep_every == 0:
                    keep()
        finally:
            ahead.close()

    def _is_over(self) -> bool:
        return self.reached.share(self.step, self.recipe.budget) >= 1

    def _batches(self) -> Iterator[TrainBatch]:
        recipe, accelerator = self.recipe, self.accelerator
        found = batches.groups(
            self._source,
            tokens=max(recipe.tokens_per_batch // (accelerator.num_processes * recipe.accumulate), 1),
            max_length=recipe.max_length,
            pool=recipe.pool,
            share=recipe.held_out,
            seed=recipe.seed,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
        )
        for group in islice(found, self._drawn, None):
            yield self._collate(group)

    def _collate(self, group: Sequence[TrainSequence]) -> TrainBatch:
        return batches.collate(group, self.recipe.max_length, self._chunk, pin=self.device.type == "cuda")

    def _first_or_next(self, group: Sequence[TrainBatch]) -> tuple[Stats, Any]:
        """One step; if compilation fails in the very first one, training continues without it."""
        try:
            return self._step(group)
        except Exception as error:
            if self._trainee.figures is None or self.step > 0:
                raise
            self.why += f"; not compiled: {type(error).__name__}: {str(error).splitlines()[:1]}"
            self._trainee.figures = None
            self._optimizer.zero_grad()
            return self._step(group)

    def _step(self, group: Sequence[TrainBatch]) -> tuple[Stats, Any]:
        """One optimiser step, in which every sequence of every rank and batch has the same weight."""
        accelerator, recipe = self.accelerator, self.recipe
        share = rate(self.reached.share(self.step + 0.5, recipe.budget), recipe.warmup)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = recipe.lr * share
        own = torch.tensor(float(sum(batch.sequences for batch in group)), device=self.device)
        # Gradients are averaged over ranks and accumulation steps; this scale turns the average into the needed sum.
        scale = accelerator.num_processes * recipe.accumulate / accelerator.reduce(own, "sum")
        found: Stats | None = None
        norm: Any = None
        for batch in group:
            with accelerator.accumulate(self._model):
                total, penalty, stats = self._model(batches.to(batch, self.device), self._head_VD)
                accelerator.backward(total * scale + penalty)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(self._model.parameters(), recipe.clip)
                self._optimizer.step()
                self._optimizer.zero_grad()
            found = stats if found is None else _added(found, stats)
        assert found is not None, "a step has at least one batch"
        return found, norm

    def _agree(self, began: float) -> None:
        """Synchronises progress, so that all ranks have the same learning rate and end at the same step."""
        recipe, seconds = self.recipe, clock.monotonic() - began
        if self.accelerator.num_processes == 1:
            self.reached, self.stopped = self.reached.next(self.step, self.tokens, seconds), self.asked
        elif is_agreement(self.step, recipe.log_every) or self.step % recipe.keep_every == 0:
            main = self.accelerator.is_main_process
            mine = torch.tensor([self.tokens, seconds if main else 0.0, float(self.asked)], dtype=torch.float64)
            tokens, seconds, asked = self.accelerator.reduce(mine.to(self.device), "sum").tolist()
            self.reached, self.stopped = self.reached.next(self.step, tokens, seconds), asked > 0

    def _summed(self, stats: Stats) -> DrafterMetrics:
        return measured(Stats(*self.accelerator.reduce(torch.stack(list(stats)), "sum").unbind(0)))

    def _line(self, found: DrafterMetrics, norm: Any) -> Line:
        return {
            "step": self.step,
            "tokens": round(self.reached.tokens),
            "seconds": round(self.reached.seconds, 2),
            "loss": round(self._weighted(found), 5),
            "length": round(found.length(), 4),
            "agreement": [round(x, 4) for x in found.agreement],
            "alpha": [round(x, 4) for x in found.alpha],
            "norm": round(float(norm), 4) if norm is not None else None,
            "lr": self._optimizer.param_groups[0]["lr"],
        }

    def _weighted(self, found: DrafterMetrics) -> float:
        weights = self._trainee.step_weights
        return sum(w * x for w, x in zip(weights, found.loss, strict=True)) / sum(weights)

    # Measuring.

    @torch.no_grad()
    def measure(self) -> Line:
        """The results of the averaged drafter on the held-out sequences, in total and by domain."""
        domains = sorted({one.domain for one in self.held_out})
        limit = self.recipe.tokens_per_batch
        work: list[tuple[int, list[TrainSequence]]] = []
        for number, domain in enumerate(domains):
            mine = [one for one in self.held_out if one.domain == domain]
            work += [(number, group) for group in batches.cut(mine, limit, self.recipe.max_length)]
        sums = torch.zeros(len(domains), len(Stats._fields), self._trainee.steps, dtype=torch.float64)
        sums = sums.to(self.device)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self._model.eval()
        with self.average.applied():
            # Every rank calls the model the same number of times: with sharded weights a call is collective.
            for begin in range(0, len(work), world):
                number, group = work[(begin + rank) % len(work)]
                *_, stats = self._model(batches.to(self._collate(group), self.device), self._head_VD)
                if begin + rank < len(work):
                    sums[number] += torch.stack(list(stats))
        self._model.train()
        sums = self.accelerator.reduce(sums, "sum")
        by_domain = {
            domain: self._held_out(measured(Stats(*sums[number].unbind(0)))) for number, domain in enumerate(domains)
        }
        return {"held_out": self._held_out(measured(Stats(*sums.sum(0).unbind(0)))), "domains": by_domain}

    def _held_out(self, found: DrafterMetrics) -> Line:
        return {
            "rows": found.tokens,
            "loss": round(self._weighted(found), 5),
            "length": round(found.length(), 4),
            "lengths": [round(found.length(drafts), 4) for drafts in range(1, len(found.loss) + 1)],
            "lengths_sampled": [round(found.length_sampled(drafts), 4) for drafts in range(1, len(found.loss) + 1)],
            "agreement": [round(x, 4) for x in found.agreement],
            "alpha": [round(x, 4) for x in found.alpha],
        }

    # The state. All ranks must call these; the main process gets whole tensors.

    def averaged(self) -> dict[str, Tensor]:
        """The drafter to save, float32, whole tensors under the names of its file."""
        return {name: train_state.whole(value) for name, value in zip(self._names, self.average.values, strict=True)}

    def state(self) -> tuple[train_state.Facts, dict[str, Tensor]]:
        """The facts and whole tensors from which `resume` continues."""
        steps, tensors = self._moments().read()
        tensors |= {f"ema.{name}": value for name, value in self.averaged().items()}
        if self._window is not None:
            tensors["window.stats"] = self.accelerator.reduce(torch.stack(list(self._window)), "sum")
        tensors["random.cpu"] = torch.get_rng_state()
        tensors |= {f"begin.{name}": value for name, value in zip(self._names, self._trainee.begin, strict=False)}
        facts = train_state.Facts(
            step=self.step,
            reached=self.reached,
            drawn=self._drawn,
            optimizer_step=steps,
            tokens=round(self.reached.tokens),
        )
        return facts, tensors

    @torch.no_grad()
    def resume(self, facts: train_state.Facts, tensors: Mapping[str, Tensor]) -> None:
        """Continues from a state: the same step, weights and position in the data, so results are as if uninterrupted.

        Raises KeyError if the state does not contain this drafter's tensors.
        """
        self._moments().write(facts.optimizer_step, tensors)
        for name, value in zip(self._names, self.average.values, strict=True):
            train_state.put(value, tensors[f"ema.{name}"])
        for name, value in zip(self._names, self._trainee.begin, strict=False):
            value.copy_(tensors[f"begin.{name}"])
        torch.set_rng_state(tensors["random.cpu"])
        self.step, self.reached, self._drawn = facts.step, facts.reached, facts.drawn
        window = tensors.get("window.stats")
        if self.accelerator.is_main_process:  # its sums represent those of all ranks
            self.tokens = facts.tokens
            self._window = None if window is None else Stats(*window.to(self.device).unbind(0))

    def _moments(self) -> train_state.Moments:
        return train_state.Moments(self.accelerator.unwrap_model(self._model), self._optimizer, self._names)


def _optimizer(accelerator: Any, drafter: Drafter, recipe: Recipe) -> torch.optim.Optimizer:
    """Muon for the matrices of a block drafter, else AdamW: also with ZeRO, whose flat partitions have no matrices."""
    learnt = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    given: dict[str, Any] = {"lr": recipe.lr, "betas": recipe.betas, "weight_decay": recipe.weight_decay}
    if not isinstance(drafter, BlockDrafter) or getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return torch.optim.AdamW(learnt, **given)
    matrices = drafter.matrices()
    taken = {id(parameter) for parameter, _ in matrices}
    return Muon(matrices, [parameter for parameter in learnt if id(parameter) not in taken], **given)


def _added(a: Stats, b: Stats) -> Stats:
    return Stats(*(x + y for x, y in zip(a, b, strict=True)))
