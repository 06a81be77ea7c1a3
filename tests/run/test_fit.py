"""Which configurations fit into memory, to the last page; one that does not fit raises a one-line error with its
arithmetic, and advice that works.
"""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.deploy.config import size
from redline.errors import ConfigError
from redline.model.draft_shard import left_out
from redline.model.k2.config import K2Config, Nvfp4Experts
from redline.model.k2.shapes import shape
from redline.model.k2.write import tiny_config
from redline.ops.block_attention import TOGETHER
from redline.run.fit import ROOM, Layout, MemorySizes, fit, in_steps
from redline.run.graphs.shapes import shapes
from redline.run.kv import KvPool
from tests.tiny_model import tiny_block, tiny_drafter, tiny_model

CONFIG = tiny_config(max_position_embeddings=1000)
PAGE = 64 * 3 * (32 + 8) * 2  # tokens x layers x (latent + rotated key) x bf16
SIZES = MemorySizes(CONFIG)
PLENTY = 10**12
KIMI = shape("kimi-k2.6")


@pytest.mark.parametrize(("kv_bytes", "pages"), [(PAGE, 1), (10 * PAGE - 1, 9), (10 * PAGE, 10)])
def test_pages_fill_the_memory(kv_bytes: int, pages: int):
    layout = fit(SIZES, PLENTY, kv_bytes)
    assert (layout.pages, layout.page_bytes, layout.kv_bytes) == (pages, PAGE, pages * PAGE)
    assert layout.tokens == layout.max_model_len == 64 * pages


def test_float32_pages_are_twice_as_large():
    assert fit(replace(SIZES, kv_dtype=torch.float32), PLENTY, 10 * PAGE).pages == 5


def test_no_job_is_longer_than_the_model_reads():
    assert fit(SIZES, PLENTY, 100 * PAGE).max_model_len == 1000
    with pytest.raises(ConfigError, match="1,001; this model supports 1 to 1,000 tokens"):
        fit(SIZES, PLENTY, 100 * PAGE, 1001)


@pytest.mark.parametrize("wanted", [0, -5])
def test_a_job_has_room_for_a_token(wanted: int):
    with pytest.raises(ConfigError, match=f"max-model-len is {wanted}; this model supports 1 to"):
        fit(SIZES, PLENTY, 100 * PAGE, wanted)


def test_a_share_of_what_is_left_goes_to_pages_and_more_where_a_job_needs_it():
    free = SIZES.needs(1000).whole + 100 * PAGE
    assert abs(fit(SIZES, free).pages - 25) <= 1
    assert fit(SIZES, free, max_model_len=1000).pages == 25
    free = SIZES.needs(1000).whole + 16 * PAGE
    assert fit(SIZES, free, max_model_len=1000).pages == 16  # 1,000 tokens are 16 pages


def test_where_nothing_is_said_pages_take_no_more_than_4_gib_of_a_large_machine():
    assert 4 * 2**30 - PAGE < fit(SIZES, PLENTY).kv_bytes <= 4 * 2**30
    assert fit(SIZES, PLENTY, 5 << 30).kv_bytes > 4 * 2**30, "more than the default if it is configured"


def test_pages_have_most_of_a_gpu_that_a_worker_has_for_itself():
    gpu = replace(MemorySizes(KIMI), device="cuda", gpu_kernels=True, ranks=8)
    free = 141 * 10**9
    shared, alone = fit(gpu, free), fit(gpu, free, alone=True)
    assert shared.kv_bytes <= 4 << 30
    left = gpu.left(free, alone.max_model_len)
    assert alone.kv_bytes == pytest.approx(0.9 * left, rel=0.001)
    assert alone.max_model_len == KIMI.max_position_embeddings > shared.max_model_len
    assert fit(gpu, free, 10 << 30, alone=True) == fit(gpu, free, 10 << 30), "the configured size must be used"
    for device in ("cpu", "cuda"):
        other = replace(gpu, device=device, gpu_kernels=False)
        assert fit(other, 10**12, alone=True) == fit(other, 10**12), "a CPU's memory is shared with other processes"


def test_steps_are_as_large_as_leaves_room_for_pages():
    sizes = MemorySizes(KIMI, device="cuda", gpu_kernels=True, ranks=8)
    few, many = (replace(sizes, step_tokens=tokens) for tokens in (2048, 8192))
    needs, more = many.needs(1).whole, many.needs(1).whole - few.needs(1).whole
    assert more > 0
    for free, expected in [(needs + ROOM * more, many), (needs + ROOM * more - 1, few), (0, few), (10 * needs, many)]:
        assert in_steps(sizes, free, (2048, 8192)) == expected
    assert in_steps(sizes, 0, (512,)).step_tokens == 512


def test_a_small_model_does_not_fill_a_gpu_with_pages():
    nano = replace(MemorySizes(shape("kimi-nano")), device="cuda", gpu_kernels=True)
    assert fit(nano, 141 * 10**9, alone=True).pages == 32_768
    assert fit(nano, 141 * 10**9, 40 << 30, alone=True).pages > 32_768, "more than the default if it is configured"


def test_what_is_not_pages_counts_too():
    needs = SIZES.needs(1000)
    assert needs.weights == CONFIG.weight_bytes
    fit(SIZES, needs.whole + 16 * PAGE, 16 * PAGE, 1000)
    with pytest.raises(ConfigError, match="do not fit into"):
        fit(SIZES, needs.whole + 16 * PAGE - 1, 16 * PAGE, 1000)


def test_each_part_follows_what_it_is_made_of():
    base = MemorySizes(KIMI)
    short = base.needs(1000)
    assert short.recorded == short.drafter == 0
    assert base.needs(100_000).scratch > short.scratch  # the latents of a prompt's context are expanded
    assert base.needs(100_000).slots > short.slots + 65 * 8 * 99_000
    assert replace(base, step_tokens=2048).needs(1000).scratch > short.scratch
    assert replace(base, positions=4).needs(1000).scratch > short.scratch
    gpu = replace(base, device="cuda", gpu_kernels=True)
    assert gpu.needs(1000).recorded > 0
    assert replace(gpu, positions=4).needs(100_000).recorded > gpu.needs(1000).recorded
    assert replace(gpu, drafter=tiny_drafter().config).needs(1000).recorded > gpu.needs(1000).recorded
    drafter = tiny_drafter()
    drafts = MemorySizes(
        tiny_model().config, drafter=drafter.config, drafter_parameters=drafter.parameter_count, positions=4
    )
    assert drafts.needs(100).drafter >= 6 * sum(parameter.numel() for parameter in drafter.parameters())
    rows, hidden = drafter.config.vocab_size, drafter.config.hidden_size
    for sizes, own, of_target in (
        (drafts, 0, 2 * rows * hidden),
        (replace(drafts, device="cuda", gpu_kernels=True), rows * (4 - hidden), rows * (4 + hidden)),
    ):
        shared = replace(sizes, drafter=replace(drafter.config, draft_vocab_size=None))
        for each, more in ((sizes, own), (shared, of_target)):
            rounded = replace(each, head_bits=8).needs(100).drafter
            assert rounded - each.needs(100).drafter == more
    for changes in ({"num_attention_heads": 4, "num_key_value_heads": 4}, {"draft_vocab_size": None}):
        two = replace(drafts, device="cuda", gpu_kernels=True, ranks=2, drafter=replace(drafter.config, **changes))
        assert two.drafter is not None
        spared = 2 * left_out(two.drafter, 2)
        assert spared > 0
        assert replace(two, ranks=1).needs(100).drafter - two.needs(100).drafter == spared
        assert replace(two, gpu_kernels=False).needs(100).drafter == replace(two, ranks=1).needs(100).drafter
        eight = replace(two, head_bits=8).needs(100).drafter - two.needs(100).drafter
        own = 0 if two.drafter.draft_vocab_size is None else 2 * rows * hidden
        assert eight == (rows * (hidden + 4) - own) // 2
    assert fit(drafts, PLENTY).draft_bytes == 64 * drafter.config.kv_width * 2 + 4 * drafter.config.hidden_size


def test_ranks_on_gpus_hold_their_part_of_a_block_drafter():
    block = tiny_block()
    whole = MemorySizes(
        tiny_model().config, drafter=block.config, drafter_parameters=block.parameter_count, positions=4,
        device="cuda", gpu_kernels=True,
    )  # fmt: skip
    even = replace(block.config, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64)
    one, two = (replace(whole, drafter=even, ranks=ranks).needs(100).drafter for ranks in (1, 2))
    assert one - two == 2 * left_out(even, 2) > 0
    odd = replace(block.config, num_attention_heads=3, num_key_value_heads=3)
    one, two = (replace(whole, drafter=odd, ranks=ranks).needs(100).drafter for ranks in (1, 2))
    assert one == two


@pytest.mark.parametrize(("positions", "count"), [(1, 21), (4, 84), (8, 168)])
def test_all_shapes_are_counted_and_explained_to_the_sum(positions: int, count: int):
    """Both the shapes captured before the first job, and those captured later in idle times."""
    gpu = MemorySizes(KIMI, device="cuda", gpu_kernels=True, positions=positions)
    recorded = gpu.recorded_steps(100_000)
    assert [*recorded.shapes] == shapes(64, positions, 100_032)
    assert len(recorded.shapes) == count
    assert recorded.between == max(memory.between for memory in recorded.shapes.values())
    assert gpu.needs(100_000).recorded == recorded.whole
    first, *lines, total = recorded.explain()
    assert first.startswith(f"CUDA graphs      {count} shapes of rows x positions")
    assert first.endswith(f"the last {count - 24} while idle" if count > 24 else "all before the first job")
    assert [line.split()[:5] for line in lines] == [
        [f"{shape.rows}", "x", f"{shape.positions}", "to", f"{shape.longest:,}"] for shape in recorded.shapes
    ]
    launches = [float(line.split()[5].replace(",", "")) for line in lines]
    between = [float(line.split()[9].replace(",", "")) for line in lines]
    whole = float(total.split()[-2].replace(",", ""))
    assert whole == pytest.approx(sum(launches) + max(between), rel=0.002)
    assert whole == pytest.approx(recorded.whole / 1e6, abs=0.1)


def test_nvfp4_is_kept_as_it_is_on_every_device():
    config = replace(KIMI, quantization=Nvfp4Experts("ModelOpt"))
    assert MemorySizes(config, device="cuda", gpu_kernels=True).needs(1000).weights == config.weight_bytes
    assert MemorySizes(config).needs(1000).weights == config.weight_bytes


def test_the_explanation_multiplies_out():
    layout = fit(SIZES, PLENTY, 10 * PAGE, 320)
    assert layout.explain() == [
        f"a page           64 tokens x 240 bytes = {PAGE:,} bytes",
        f"KV memory        10 pages x {PAGE:,} bytes = 0.00 GB",
        "KV capacity      640 tokens = 2.0 x the longest context of 320",
    ]


def test_pages_that_no_machine_has_memory_for_are_one_line():
    with pytest.raises(ConfigError, match=r"kv-memory: cannot allocate .* GB"):
        KvPool(tiny_model(), Layout(1 << 40, 64, torch.bfloat16, PAGE))


def test_weights_that_do_not_fit_are_told_with_what_is_missing():
    for free in (0, CONFIG.weight_bytes - 1, SIZES.needs(1).whole + PAGE - 1):
        with pytest.raises(
            ConfigError, match=r"GB of weights .* do not fit into .* too many; use a larger device"
        ) as told:
            fit(SIZES, free)
        assert all(line in str(told.value) for line in CONFIG.explain_weight_bytes())


FLAGS = {"--kv-memory": lambda text: size(text, "kv-memory"), "--max-model-len": int}


def advised(message: str) -> list[dict[str, int]]:
    """The flags that an error message advises, one dictionary for each alternative."""
    assert "\n" not in message
    found = re.findall(r"(?:give|or) ((?:--[a-z-]+ \S+(?<![,.]) ?)+)", message.replace(",", " ,"))
    alternatives = [dict(re.findall(r"(--[a-z-]+) (\S+)", one)) for one in found]
    return [{name: FLAGS[name](value) for name, value in one.items()} for one in alternatives]


CONFIGS = {
    "tiny": CONFIG,
    "kimi": KIMI,
    "nano": shape("kimi-nano"),
    "nvfp4": replace(KIMI, quantization=Nvfp4Experts("ModelOpt")),
}


@settings(max_examples=200, deadline=None)
@given(
    config=st.sampled_from(list(CONFIGS.values())),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
    gpu=st.booleans(),
    alone=st.booleans(),
    positions=st.integers(1, 16),
    room=st.floats(0, 3),
    kv=st.none() | st.floats(0, 1.5),
    length=st.none() | st.floats(0, 1),
    digits=st.integers(0, 10),
)
def test_what_fits_fits_and_following_the_advice_fits(
    config: K2Config,
    dtype: torch.dtype,
    gpu: bool,
    alone: bool,
    positions: int,
    room: float,
    kv: float | None,
    length: float | None,
    digits: int,
):
    """Memory from none to plenty, pages from none to more than fit, every length."""
    device = "cuda" if gpu else "cpu"
    sizes = MemorySizes(config, dtype, positions=positions, device=device, gpu_kernels=gpu)
    beside = sizes.page_bytes * 10**digits
    free = int(room * sizes.needs(1).whole) if room < 1 else sizes.needs(1).whole + int((room - 1) * beside)
    kv_bytes = None if kv is None else int(kv * max(free - sizes.needs(1).whole, sizes.page_bytes))
    wanted = None if length is None else max(1, int(length * config.max_position_embeddings))

    def check(kv_bytes: int | None, wanted: int | None) -> None:
        layout = fit(sizes, free, kv_bytes, wanted, alone=alone)
        assert layout.kv_bytes + sizes.needs(layout.max_model_len).whole <= free
        assert 1 <= layout.max_model_len <= min(layout.tokens, config.max_position_embeddings)
        assert wanted in (None, layout.max_model_len)
        assert kv_bytes is None or layout.kv_bytes <= kv_bytes < layout.kv_bytes + layout.page_bytes

    try:
        check(kv_bytes, wanted)
    except ConfigError as error:
        refusal = str(error)
    else:
        return
    advice = advised(refusal)
    for flags in advice:
        check(flags.get("--kv-memory", kv_bytes), flags.get("--max-model-len", wanted))
    hopeless = sizes.left(free, 1) < sizes.page_bytes
    assert bool(advice) != hopeless, refusal
    assert ("a larger device" in refusal) == hopeless


@pytest.mark.parametrize(
    ("kv_bytes", "wanted", "flags"),
    [
        (5 * PAGE, 1000, ["--kv-memory", "--max-model-len"]),
        (50 * PAGE, 1000, ["--kv-memory", "--max-model-len"]),
        (None, 1000, []),
        (PAGE - 1, None, ["--kv-memory"]),
        (PAGE - 1, 1000, ["--kv-memory"]),
    ],
)
def test_the_advice_changes_one_flag_where_that_is_enough(kv_bytes: int | None, wanted: int | None, flags: list[str]):
    free = SIZES.needs(1000).whole + 20 * PAGE
    if not flags:
        assert fit(SIZES, free, kv_bytes, wanted).pages == 16
        return
    with pytest.raises(ConfigError) as told:
        fit(SIZES, free, kv_bytes, wanted)
    assert [*map(list, advised(str(told.value)))] == [[flag] for flag in flags]


def test_sizes_are_advised_in_as_few_digits_as_they_take():
    free = SIZES.needs(1000).whole + 20 * PAGE
    with pytest.raises(ConfigError, match=r"give --kv-memory \d\.\d\dMB, or"):
        fit(SIZES, free, 50 * PAGE, 1000)
    big = MemorySizes(KIMI)
    free = big.needs(100_000).whole + (8 << 30)
    with pytest.raises(ConfigError, match=r"give --kv-memory 7\.\d\dGB, or"):
        fit(big, free, 5 << 30, 100_000)


def test_the_advice_changes_both_where_neither_alone_is_enough():
    free = SIZES.needs(1000).whole + 10 * PAGE
    with pytest.raises(ConfigError) as told:
        fit(SIZES, free, PAGE - 1, 1000)
    (both,) = advised(str(told.value))
    assert set(both) == {"--kv-memory", "--max-model-len"}
    assert fit(SIZES, free, both["--kv-memory"], both["--max-model-len"]).max_model_len > 500


def test_a_size_is_advised_in_a_unit_that_people_read():
    with pytest.raises(ConfigError, match=r"--kv-memory \d+\.\d\d[GM]B"):
        fit(SIZES, SIZES.needs(1000).whole + 200 * PAGE, 500 * PAGE, 1000)


def test_the_libraries_of_a_small_model_take_no_more_than_a_small_machine_has():
    for device, least in (("cpu", 64), ("cuda", 768)):
        assert (
            least << 20
            < replace(SIZES, device=device, step_tokens=1, max_running=1).needs(1).scratch
            < 1.1 * (least << 20)
        )


def test_a_block_drafter_is_counted():
    """Its pages have no last feature; a CPU reads contexts in parts of a fixed size, a GPU captures its layers."""
    drafter, plain = tiny_block(), MemorySizes(tiny_model().config, positions=6)
    given = {"drafter": drafter.config, "drafter_parameters": drafter.parameter_count}
    cpu = replace(plain, **given)
    assert cpu.draft_bytes == 64 * drafter.config.kv_width * 2
    assert cpu.needs(100).drafter == 6 * drafter.parameter_count
    assert cpu.needs(100).scratch - plain.needs(100).scratch > TOGETHER * 4 * drafter.config.row_width
    gpu, without = (replace(each, device="cuda", gpu_kernels=True) for each in (cpu, plain))
    assert gpu.needs(100).drafter == 2 * drafter.parameter_count
    assert gpu.needs(100).recorded > without.needs(100).recorded
