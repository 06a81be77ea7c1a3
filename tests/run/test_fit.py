"""What fits into memory, to the last page; what does not is one line with its arithmetic."""

import re

import pytest
import torch

from redline.errors import ConfigError
from redline.model.write import tiny_config
from redline.run.fit import Layout, check_weights, fit
from redline.run.kv import KvPool
from tests.tiny_model import tiny_model

CONFIG = tiny_config(max_position_embeddings=1000)
PAGE = 64 * 3 * (32 + 8) * 2  # tokens x layers x (latent + rotated key) x bf16


@pytest.mark.parametrize(("kv_bytes", "pages"), [(PAGE, 1), (10 * PAGE - 1, 9), (10 * PAGE, 10)])
def test_pages_fill_the_memory(kv_bytes: int, pages: int):
    layout = fit(CONFIG, kv_bytes, torch.bfloat16, None)
    assert (layout.pages, layout.page_bytes, layout.kv_bytes) == (pages, PAGE, pages * PAGE)
    assert layout.tokens == layout.max_model_len == 64 * pages


def test_float32_pages_are_twice_as_large():
    assert fit(CONFIG, 10 * PAGE, torch.float32, None).pages == 5


def test_no_job_is_longer_than_the_model_reads():
    assert fit(CONFIG, 100 * PAGE, torch.bfloat16, None).max_model_len == 1000
    with pytest.raises(ConfigError, match="1,001; this model reads 1,000 tokens at most"):
        fit(CONFIG, 100 * PAGE, torch.bfloat16, 1001)


@pytest.mark.parametrize("wanted", [0, -5])
def test_a_job_has_room_for_a_token(wanted: int):
    with pytest.raises(ConfigError, match=f"max-model-len is {wanted}; .* 1 at least"):
        fit(CONFIG, 100 * PAGE, torch.bfloat16, wanted)


def test_one_job_must_fit():
    assert fit(CONFIG, 4 * PAGE, torch.bfloat16, 256).pages == 4
    for kv_bytes, wanted in ((4 * PAGE, 257), (PAGE - 1, None), (0, None)):
        with pytest.raises(ConfigError) as caught:
            fit(CONFIG, kv_bytes, torch.bfloat16, wanted)
        assert len(str(caught.value).splitlines()) == 1
        advice = re.search(r"--kv-memory (\d+\.\d\d)GB", str(caught.value))
        assert advice is not None
        assert fit(CONFIG, round(float(advice[1]) * 1e9), torch.bfloat16, wanted).max_model_len >= (wanted or 1)


def test_the_explanation_multiplies_out():
    layout = fit(CONFIG, 10 * PAGE, torch.bfloat16, 320)
    assert layout.explain() == [
        f"a page           64 tokens x 240 bytes = {PAGE:,} bytes",
        f"KV memory        10 pages x {PAGE:,} bytes = 0.00 GB",
        "KV capacity      640 tokens = 2.0 x the longest context of 320",
    ]


def test_pages_that_no_machine_has_memory_for_are_one_line():
    with pytest.raises(ConfigError, match=r"kv-memory: this machine does not give .* GB"):
        KvPool(tiny_model(), Layout(1 << 40, 64, torch.bfloat16, PAGE))


def test_weights_that_do_not_fit_are_told_with_what_is_missing():
    free = CONFIG.weight_bytes - 1
    with pytest.raises(ConfigError, match=r"of weights do not fit into .* too many; a larger device") as told:
        check_weights(CONFIG, free, 0)
    assert all(line in str(told.value) for line in CONFIG.explain_weight_bytes())


def test_pages_that_do_not_fit_beside_the_weights_are_told_what_would():
    free = CONFIG.weight_bytes + 10**9
    check_weights(CONFIG, free, 10**9)
    with pytest.raises(ConfigError, match=r"2\.00 GB of pages \(kv-memory\).*give --kv-memory 1\.00GB or less"):
        check_weights(CONFIG, free, 2 * 10**9)
