"""A decode step that runs entirely on the device: forward, settle, draft, from a small integer plan and the device's
slots.

Only the device knows the current state of a slot: its tokens, length and drafts. Forward runs the last token and the
drafts, settle keeps the accepted tokens, and the drafter's passes write the drafts that the next step verifies. So the
next step can be launched before this one has ended, without any wait on the host. Everything here can be captured in a
CUDA graph (`graph_recorder.py`). Contents of a plan and a result: `kernels.cuda.step.step_rows`. Logit
adjustments of a row, and the masks that the host may write between forward and settle: `kernels.cuda.step.adjust`.

B rows of a shape, K positions of each, T = B K, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from redline.kernels.by_chip import best
from redline.kernels.cuda.step.adjust import LogitAdjustments, adjust, count_tokens
from redline.kernels.cuda.step.best import counters
from redline.kernels.cuda.step.keep_drafts import NextRows, keep_drafts
from redline.kernels.cuda.step.read_rows import read_rows
from redline.kernels.cuda.step.step_rows import (
    ALTERED,
    BEFORE,
    COLUMNS,
    FACTS,
    MOST_DRAFTS,
    MOST_ROWS,
    MOST_STEP,
    RESULT_COLUMNS,
    SEED,
    SLOT,
    SLOT_ODDS,
    TOKENS,
    SlotTensors,
    step_rows,
)
from redline.kernels.cuda.step.suffix_match import suffix_match
from redline.kernels.cuda.step.verify_drafts import shares_of, verify_drafts
from redline.kernels.inputs import Inputs
from redline.messages.step import Shape
from redline.model.block.module import BlockDrafter
from redline.model.drafter import Drafter
from redline.model.eagle3.module import Eagle3
from redline.model.k2.cpu import K2
from redline.ops.sample import ODDS
from redline.run.graphs.block_round import round_rows
from redline.run.kv import KvPool
from redline.run.sampling.on_device import TOP_LOGPROBS, sample_rows, score_rows
from redline.run.slots import Slots

NO_CHOICE = -2  # token id of a row that may choose no token: its sampling parameters exclude all finite logits


class SamplingKind(IntEnum):
    """The sampling that a step's rows need at most: argmax (greedy) for all, sampling from the full vocabulary, or
    after filters (top-k, top-p, ...)."""

    LIKELIEST = 0
    WHOLE = 1
    NARROWED = 2


class SharedState:
    """Device state shared by the CUDA graphs of all shapes. Each step reads and updates it.

    plan      int64 [MOST_ROWS, COLUMNS], filled before a step
    results   int64 [MOST_ROWS, RESULT_COLUMNS], read after it
    standing  state of each slot
    wishes    logit adjustments of each slot
    masks     int32 [positions of a step, at most, ceil(V / 32)]: allowed tokens, for rows that are MASKED
    scores    float64 [positions of a step, at most, TOP_LOGPROBS.stop]: log probabilities, if requested
    shares    int64 [MOST_DRAFTS]: synthetic acceptance rates, as `verify_drafts` reads them

    The last slot and the last page are spare: writes to be discarded go there.
    """

    def __init__(
        self,
        model: K2,
        slots: Slots,
        kv: KvPool,
        drafter: Drafter | None = None,
        *,
        suffix: bool = False,
        rates: Sequence[float] = (),
    ) -> None:
        """drafter: prepared for the model. suffix: whether drafts may also come from suffix matches.

        rates: synthetic acceptance rates (`policy.synthetic.rates_of`); empty: drafts are compared with the target's
        tokens.
        """
        self.model = model
        self.slots = slots
        self.kv = kv
        self.drafter = drafter
        self.suffix = suffix
        self.layers: Sequence[int] = () if drafter is None else drafter.config.layer_ids

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=model.device)

        self.plan = zeros(MOST_ROWS, COLUMNS)
        self.results = zeros(MOST_ROWS, RESULT_COLUMNS)
        count, vocabulary, positions = slots.tokens.shape[0], model.config.vocab_size, MOST_STEP
        self.wishes = LogitAdjustments.empty(count, vocabulary, model.device)
        self.masks = torch.full((positions, -(-vocabulary // 32)), -1, dtype=torch.int32, device=model.device)
        self.scores = torch.zeros(positions, TOP_LOGPROBS.stop, dtype=torch.float64, device=model.device)
        self.shares = torch.tensor(shares_of(rates), device=model.device)
        self.standing = SlotTensors(
            *(slots.tokens, slots.tables),
            lengths=zeros(count),
            facts=zeros(count, FACTS),
            drafts=zeros(count, MOST_DRAFTS),
            drafted=zeros(count),
            by=zeros(count),
        )
        if drafter is not None:
            pairs = drafter.served.inv_freq.shape[0]
            self.next = NextRows(
                ids_B=zeros(MOST_ROWS),
                cos_B=torch.zeros(MOST_ROWS, pairs, device=model.device),
                sin_B=torch.zeros(MOST_ROWS, pairs, device=model.device),
                rows_B=zeros(MOST_ROWS),
                lengths_B=torch.zeros(MOST_ROWS, dtype=torch.int32, device=model.device),
            )
            self.fed = torch.zeros(MOST_ROWS, model.config.hidden_size, dtype=model.dtype, device=model.device)
        if isinstance(drafter, BlockDrafter):
            states = MOST_ROWS, drafter.config.drafts, model.config.hidden_size
            self.block_states = torch.zeros(*states, dtype=model.dtype, device=model.device)
            self.block_draft = zeros(1)  # the draft that the next `draft_on` makes
        self.frequencies = model.config.inv_freq().to(model.device)
        counters(model.device)  # allocated before graphs are captured
        self.nobody = count - 1
        self.spare_page = kv.pages
        slots.tables[self.nobody].fill_(self.spare_page)


class DecodeStep:
    """The decode step of one shape.

    A position of the shape that no row needs repeats a position of one of the step's rows, and writes its latent to the
    spare page. So it reads no experts in addition to those of the step.
    """

    def __init__(self, shared: SharedState, shape: Shape) -> None:
        self.shape = shape
        self._features: Tensor | None = None  # hidden states of the last step for the drafter, [T, layers * D]
        self._shared = shared
        self._plan_BC = shared.plan[: shape.rows]
        positions = shape.rows * shape.positions
        self._tokens_Q = torch.arange(positions, dtype=torch.int32, device=shared.plan.device)
        self._ids_T: Tensor | None = None
        self._logits_TV: Tensor | None = None
        self._slots_B: Tensor | None = None

    @property
    def drafts(self) -> bool:
        """Whether a drafter follows the step's rows."""
        return self._shared.drafter is not None

    def forward(self) -> None:
        """Computes the logits of every position from the plan."""
        shared, shape = self._shared, self.shape
        step = step_rows(
            *(self._plan_BC, shared.standing, shared.results),
            *(shared.frequencies, shape.positions, shared.spare_page),
        )
        inputs = Inputs(
            **step._asdict(),
            chunks=(),
            tokens_Q=self._tokens_Q,
            tables=shared.slots.tables,
            longest=shape.longest,
            positions=shape.positions,
        )
        self._ids_T = step.ids_T
        hidden, self._features = shared.model.forward(inputs, shared.kv.planes, shared.layers)
        self._logits_TV = shared.model.logits(hidden)

    def allow(self, row: int, masks_KW: Tensor) -> None:
        """Restricts a row that is MASKED in the plan to its allowed tokens. Called between `forward` and `settle`.

        masks_KW: int32 [positions of the row, or fewer, ceil(V / 32)]: a bit for each token, the lowest first; position
        i follows the row's first i drafts. Positions after the last mask may have any token.
        """
        of_row_KW = self._shared.masks[row * self.shape.positions : (row + 1) * self.shape.positions]
        of_row_KW[masks_KW.shape[0] :] = -1
        of_row_KW[: masks_KW.shape[0]].copy_(masks_KW, non_blocking=True)

    def settle(self, kind: SamplingKind, *, adjusted: bool = False) -> None:
        """Chooses tokens from the logits, and writes the accepted ones to the slots and the results; then, with suffix
        matching, writes drafts from earlier text if it repeats.

        adjusted: whether any row of the plan has adjusted logits. Must follow `forward`.
        """
        shared, logits_TV = self._shared, self._logits_TV
        assert logits_TV is not None, "settle must follow forward"
        assert self._ids_T is not None
        token_T, given_T = best(logits_TV)
        finite_T = given_T
        if adjusted:
            logits_TV = adjust(*(logits_TV, self._ids_T, self._plan_BC, shared.results, shared.wishes, shared.masks))
            token_T, _ = best(logits_TV)
            finite_T = finite_T & logits_TV.gather(1, token_T[:, None])[:, 0].isfinite()
        if kind != SamplingKind.LIKELIEST:
            token_T = self._drawn(logits_TV, token_T, narrowed=kind == SamplingKind.NARROWED)
            finite_T = finite_T & (token_T >= 0)  # -1: nothing can be drawn
        if adjusted:
            altered_T = self._plan_BC[:, ALTERED].repeat_interleave(self.shape.positions) > 0
            token_T = token_T.masked_fill(given_T & altered_T & ~finite_T, NO_CHOICE)
        verify_drafts(token_T, finite_T, self._ids_T, self._plan_BC, shared.standing, shared.results, shared.shares)
        if adjusted:
            count_tokens(self._plan_BC, shared.results, shared.wishes.counts)
        if shared.suffix:
            suffix_match(self._plan_BC, shared.standing, shared.results)

    def _drawn(self, logits_TV: Tensor, likeliest_T: Tensor, *, narrowed: bool) -> Tensor:
        shared, rows, positions = self._shared, self.shape.rows, self.shape.positions
        facts_TC = shared.standing.facts[self._plan_BC[:, SLOT]].repeat_interleave(positions, 0)
        odds_TC = facts_TC[:, SLOT_ODDS].contiguous().view(torch.float64)
        cold_T = odds_TC[:, ODDS.index("temperature")] == 0
        odds_TC[:, ODDS.index("temperature")] += cold_T
        position_T = (
            shared.results[:rows, BEFORE, None] + torch.arange(positions, device=shared.plan.device)
        ).flatten()
        token_T = sample_rows(logits_TV, odds_TC, facts_TC[:, SEED], position_T, narrowed=narrowed)
        return torch.where(cold_T, likeliest_T, token_T)

    def score(self) -> None:
        """Log probabilities of the tokens that `settle` has chosen, in the model's unadjusted distribution."""
        shared, rows, positions = self._shared, self.shape.rows, self.shape.positions
        assert self._logits_TV is not None, "score must follow forward"
        token_T = shared.results[:rows, TOKENS : TOKENS + positions].flatten()
        score_rows(self._logits_TV, token_T, shared.scores[: rows * positions])

    def draft_all(self) -> None:
        """Drafts the number of tokens per row that a step of this shape verifies, at least one."""
        drafter = self._shared.drafter
        if isinstance(drafter, BlockDrafter):
            self._draft_block(drafter)
            return
        self.draft()
        for _ in range(2, self.shape.positions):
            self.draft_on()

    def _draft_block(self, drafter: BlockDrafter) -> None:
        """All drafts from one pass; the head runs once over all of them."""
        served, states_BnD = drafter.served, self._read_block(drafter)
        states_BnD = states_BnD[:, : max(1, self.shape.positions - 1)]
        logits_BnV = served.logits(states_BnD.flatten(0, 1)).unflatten(0, states_BnD.shape[:2])
        for draft in range(states_BnD.shape[1]):
            self._keep_token(served.likeliest(served.biased(logits_BnV[:, draft], self._following.ids_B)))

    def _read_block(self, drafter: BlockDrafter) -> Tensor:
        """Stores the context rows of the accepted tokens, and runs the pass -> the states of the drafts [B, n, D]."""
        shared, features = self._shared, self._features
        assert features is not None, "the drafter needs the hidden states of forward"
        rows = round_rows(
            *(drafter.config, self._plan_BC, shared.standing, shared.results),
            *(self.shape.positions, self.shape.longest, shared.spare_page),
        )
        drafter.served.read(features, rows.position_T, rows.rows_T, shared.kv.draft)
        self._following.lengths_B.copy_(rows.lengths_B)
        self._following.ids_B.copy_(rows.blocks.anchors_R)  # the token before the first draft
        first = int(not drafter.config.sample_from_anchor)
        states_BSD = drafter.served.states(rows.blocks, shared.kv.draft)
        return states_BSD[:, first : first + drafter.config.drafts]

    def _draft_of_block(self, drafter: BlockDrafter) -> None:
        """One draft of the block that `draft` has computed: the next one, by a counter on the device."""
        shared, served, rows = self._shared, drafter.served, self.shape.rows
        states_BD = shared.block_states[:rows].index_select(1, shared.block_draft)[:, 0]
        logits_BV = served.biased(served.logits(states_BD), self._following.ids_B)
        shared.block_draft.add_(1).clamp_(max=drafter.config.drafts - 1)
        self._keep_token(served.likeliest(logits_BV))

    def draft(self) -> None:
        """The drafter reads the accepted tokens, and makes the first draft after each row."""
        shared, drafter, features = self._shared, self._shared.drafter, self._features
        assert drafter is not None
        if isinstance(drafter, BlockDrafter):
            shared.block_states[: self.shape.rows] = self._read_block(drafter)
            shared.block_draft.zero_()
            self._draft_of_block(drafter)
            return
        assert features is not None, "the drafter needs the hidden states of forward"
        read = read_rows(
            *(self._plan_BC, shared.standing, shared.results),
            *(drafter.served.inv_freq, self.shape.positions, shared.spare_page),
        )
        feature_TD = drafter.fuse(features)
        shared.kv.tails[read.tails_T] = feature_TD
        self._slots_B = read.slots_B
        self._following.lengths_B.copy_(read.lengths_B)
        inputs = Inputs(
            *(read.ids_T, read.cos_T, read.sin_T, read.rows_T, (), read.last_B, read.slots_B, read.lengths_B),
            tables=shared.slots.tables,
            longest=self.shape.longest,
        )
        self._keep(drafter, *drafter.forward(inputs, feature_TD, shared.kv.draft))

    def draft_on(self) -> None:
        """One more draft for each row that wants one, from the draft before it."""
        shared, drafter, following = self._shared, self._shared.drafter, self._following
        assert drafter is not None
        if isinstance(drafter, BlockDrafter):
            self._draft_of_block(drafter)
            return
        assert self._slots_B is not None, "draft must come before draft_on"
        inputs = Inputs(
            *(following.ids_B, following.cos_B, following.sin_B, following.rows_B, ()),
            *(self._tokens_Q[: self.shape.rows], self._slots_B, following.lengths_B),
            tables=shared.slots.tables,
            longest=self.shape.longest,
        )
        self._keep(drafter, *drafter.forward(inputs, shared.fed[: self.shape.rows], shared.kv.draft))

    @property
    def _following(self) -> NextRows:
        """The rows of the drafter's next pass."""
        n, rows = self._shared.next, self.shape.rows
        return NextRows(n.ids_B[:rows], n.cos_B[:rows], n.sin_B[:rows], n.rows_B[:rows], n.lengths_B[:rows])

    def _keep(self, drafter: Eagle3, normed_BD: Tensor, fed_BD: Tensor) -> None:
        token_B = drafter.likeliest(normed_BD)
        self._shared.fed[: self.shape.rows] = fed_BD
        self._keep_token(token_B)

    def _keep_token(self, token_B: Tensor) -> None:
        shared, drafter = self._shared, self._shared.drafter
        assert drafter is not None
        keep_drafts(
            *(token_B, self._plan_BC, shared.standing, shared.results),
            *(self._following, drafter.served.inv_freq, shared.spare_page),
        )

    def forget(self) -> None:
        """Releases the tensors between the graphs, so that the next capture can reuse their memory: each step writes
        them again."""
        self._ids_T = self._logits_TV = self._slots_B = self._features = None
