"""The roofline of a worker's steps: the model's work per step over bandwidth and throughput measured at the start.

The measurement takes 0.1 s on two cores, once, while no step runs; a step's least time (floor) is then a sum of a dozen
products (`policy.floor`). On a machine that is busy at that moment, the measured rates are too low and the floors too
long.
"""

import logging

import torch

from redline.kernels.cpu import native
from redline.kernels.rates import WORKING_SET_BYTES, product_rate, read_rate
from redline.model.block.config import BlockConfig
from redline.model.draft_shard import body_left_out, head_ranks
from redline.model.drafter import Drafter
from redline.model.k2.config import K2Config
from redline.model.k2.shard import part_of
from redline.policy.floor import StepContents, StepFloor, StepWork

SIDE = 256  # rows and columns of the matrices that a CPU thread multiplies: they fit into its caches
_log = logging.getLogger(__name__)


def step_work(
    config: K2Config,
    kv_dtype: torch.dtype,
    ranks: int = 1,
    drafter: Drafter | None = None,
    head_bits: int = 16,
    draft_ranks: int = 1,
) -> StepWork:
    """The bytes that one rank's steps read and the operations that they compute.

    head_bits: bits per weight of the drafter's head. draft_ranks: tensor parallel size of the drafter, which GPU ranks
    shard.
    """
    part = part_of(config, ranks)
    heads, layers, head = part.num_attention_heads, part.num_hidden_layers, config.vocab_size * config.hidden_size
    projections = layers * part.hidden_size * (part.q_lora_rank + part.kv_width)  # into attention: may be divided
    elsewhere = part.embedding_parameters + projections * (1 - 1 / ranks)
    draft, draft_head = _drafter(drafter, draft_ranks) if drafter is not None else (0, 0)
    return StepWork(
        weight_bytes=2 * (part.dense_parameters - elsewhere),
        head_bytes=2 * head / ranks,
        expert_bytes=part.routed_parameters * config.bits_per_routed_parameter / 8,
        experts_of=config.n_routed_experts if part.moe_layers else 0,
        experts_chosen=config.num_experts_per_tok,
        latent_bytes=part.kv_bytes_per_token(kv_dtype) / ranks,  # ranks may divide the context
        position_ops=2 * (part.active_parameters - elsewhere),
        head_ops=2 * head / ranks,
        pair_ops=2 * layers * heads * (2 * part.kv_lora_rank + part.qk_rope_head_dim),
        prompt_pair_ops=2 * layers * heads * (part.qk_head_dim + part.v_head_dim),
        draft_bytes=2 * draft + draft_head * head_bits / 8,
        draft_ops=2 * (draft + draft_head),
        draft_once=drafter is not None and drafter.config.passes(2) == 1,
    )


def _drafter(drafter: Drafter, ranks: int) -> tuple[int, int]:
    """Number of weights in the matrices that each pass of a rank reads, and in its head. The matrix that fuses the
    target's hidden states is left out: it is read once per step, and none of the passes needs it. DSpark's bias, which
    is read for each draft, counts once."""
    config = drafter.config
    matrices = sum(each.numel() for each in drafter.parameters() if each.dim() > 1)
    if isinstance(config, BlockConfig):  # the table of DSpark's bias is looked up
        matrices -= config.vocab_size * config.markov_rank
    own = (config.draft_vocab_size or 0) * config.hidden_size
    head = own or config.vocab_size * config.hidden_size  # the target's head, if the drafter has none
    body = matrices - own - config.hidden_size * config.fused_width
    return body - body_left_out(config, ranks), head // head_ranks(config, ranks)


def measure(work: StepWork, device: torch.device) -> StepFloor | None:
    """The floor of steps on this device. If there is no memory for the measurement, logs a warning and returns None.

    The read rate is measured over the bytes that a step of one token reads, since a small model's weights may fit
    into a cache, but at most over WORKING_SET_BYTES, which exceeds every cache. On a CPU it is measured with the
    kernels' number of threads, and also with one: if other processes use the cores, threads wait for one another. The
    product rate is measured with one thread and multiplied by their number.
    """
    size = min(round(work.bytes(StepContents(positions=1, heads=1))), WORKING_SET_BYTES)
    try:
        if device.type == "cuda":
            floor = StepFloor(work, read_rate(device, size, 1), product_rate(device, 1))
            torch.cuda.empty_cache()  # other parts of this process allocate from the driver directly
            return floor
        threads, before = native.threads(), torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            together = read_rate(device, size, 1, ways=1)
            torch.set_num_threads(1)
            alone = read_rate(device, size, 1)
            return StepFloor(work, max(together, alone), threads * product_rate(device, 1, SIDE))
        finally:
            torch.set_num_threads(before)
    except (MemoryError, RuntimeError) as error:  # torch raises a RuntimeError if it is out of memory
        _log.warning("steps are reported without their floors: this device could not be measured: %s", error)
        return None
