"""What learned drafters share: the target's embedding and head, and a head of their own, over all tokens or some.

D hidden, V the target's vocabulary.
"""

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """Base of a drafter. Parameters and buffers have the names of the file, so `state_dict()` is the file's contents.

    The target's embedding, and its head if the drafter has none, are attached by `attach` or the drafter's `prepare`:
    frozen, shared, and not part of the state.
    """

    d2t: Tensor  # int64 [draft vocabulary]: token id - draft id; present if the draft vocabulary is reduced
    t2d: Tensor  # bool [vocabulary]: whether the drafter knows the token
    lm_head: nn.Linear  # absent if the drafter uses the target's head

    def __init__(self) -> None:
        super().__init__()
        self._embedding_VD: Tensor | None = None
        self._head_VD: Tensor | None = None

    def _add_head(self, hidden: int, drafts: int | None, vocabulary: int) -> None:
        """Adds a head over `drafts` ids, of a reduced vocabulary the first ones until `keep`. None: adds nothing."""
        if drafts is None:
            return
        self.lm_head = nn.Linear(hidden, drafts, bias=False)
        if drafts < vocabulary:
            self.register_buffer("d2t", torch.zeros(drafts, dtype=torch.int64))
            self.register_buffer("t2d", torch.arange(vocabulary) < drafts)

    def attach(self, embedding_VD: Tensor, head_VD: Tensor) -> None:
        """Attaches the target's embedding and head for training: [V, D], on the drafter's device, any floating type."""
        self._embedding_VD = embedding_VD.detach()
        self._head_VD = head_VD.detach()

    @torch.no_grad()
    def initialise(self, embedding_VD: Tensor, head_VD: Tensor) -> None:
        """Attaches the target's embedding and head [V, D], and initialises the drafter's own head from the target's."""
        self.attach(embedding_VD, head_VD)
        if "lm_head" in self._modules:
            ids = self.token_ids()
            self.lm_head.weight.copy_(head_VD if ids is None else head_VD[ids.to(head_VD.device)])

    @torch.no_grad()
    def keep(self, ids: Tensor) -> None:
        """Sets the reduced vocabulary: exactly draft_vocab_size distinct token ids. Call it before `initialise`.

        AssertionError if the number of distinct ids differs from draft_vocab_size.
        """
        ids = ids.to(self.d2t).unique()  # sorted
        assert ids.shape == self.d2t.shape, f"{len(ids)} different ids for a vocabulary of {len(self.d2t)}"
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_().index_fill_(0, ids, True)

    def token_ids(self) -> Tensor | None:
        """int64 [draft vocabulary]: the token of each draft id; None if draft ids are token ids."""
        if "d2t" not in self._buffers:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
