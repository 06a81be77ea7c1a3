"""The laws with images in the prompt: logits are transformers' (law 10); chunks (2), the prefix cache (3), drafts (4)
and company (7) change nothing; pages and rows of the feature table come back (9)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from redline.chat.page_hashes import make_job
from redline.media.hashing import image_hash
from redline.messages.delta import Delta
from redline.messages.job import Job, JobId, MediaSpan, Sampling
from redline.messages.media import ImageData
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.config import K2Config
from redline.model.k2.write import random_checkpoint
from redline.model.vision.config import VisionConfig
from redline.model.vision.load import random_tensors
from redline.worker.config import EngineConfig, Learned, Suffix
from redline.worker.engine import Engine
from tests.model.vision.oracle import their_features
from tests.oracle import transformers_model
from tests.tiny_model import kernel_config
from tests.tiny_tokenizer import TINY_VOCAB, write_tiny_tokenizer

PAD = 256 + 30 + 21  # <|media_pad|> of the tiny tokenizer
TEXT = kernel_config(
    vocab_size=TINY_VOCAB + 2, rms_norm_eps=1e-5, max_position_embeddings=4096,
    moe_intermediate_size=64, intermediate_size=128,
)  # fmt: skip
VISION = VisionConfig(
    patch=14, rows=8, columns=8, frames=4, hidden=32, layers=3, heads=2, intermediate=48,
    text_hidden=TEXT.hidden_size, projector_eps=1e-5, token=PAD,
)  # fmt: skip
SCORED = Sampling(max_tokens=1, temperature=0, prompt_logprobs=5)


class Picture(NamedTuple):
    data: ImageData

    @property
    def tokens(self) -> int:
        return self.data.rows * self.data.columns // 4


def picture(seed: int, rows: int = 6, columns: int = 8, frames: int = 1) -> Picture:
    """frames: more than one for a chunk of a video."""
    shape = frames * rows * columns, 3, 14, 14
    patches = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8).tobytes()
    hash = image_hash(patches, frames, rows, columns)
    return Picture(ImageData(hash=hash, frames=frames, rows=rows, columns=columns, patches=patches))


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def job(name: str, engine: Engine, *parts: Picture | tuple[int, ...], sampling: Sampling = SCORED) -> Job:
    """A prompt of texts and pictures, which the engine is given."""
    tokens, media = list[int](), list[MediaSpan]()
    for part in parts:
        if isinstance(part, Picture):
            data = part.data
            span = MediaSpan(
                start=len(tokens),
                tokens=part.tokens,
                hash=data.hash,
                frames=data.frames,
                rows=data.rows,
                columns=data.columns,
            )
            media.append(span)
            tokens += [PAD] * part.tokens
            engine.images[data.hash] = data
        else:
            tokens += part
    return make_job(JobId(name), tuple(tokens), sampling, engine.fingerprint, media=tuple(media))


def spoken(deltas: Sequence[Delta]) -> tuple[list[int], list[Any], list[Any]]:
    """Tokens, their log probabilities, and those of the prompt."""
    assert deltas[-1].error is None, deltas[-1].error
    return (
        [token for delta in deltas for token in delta.tokens],
        [one for delta in deltas for one in delta.logprobs],
        [one for delta in deltas for one in delta.prompt_logprobs],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "tiny"
    config = random_checkpoint(folder, TEXT, vision=VISION, media_token=PAD)
    torch.manual_seed(0)
    Eagle3(Eagle3Config.for_target(config)).save(folder / "drafter")
    return write_tiny_tokenizer(folder)


@contextmanager
def opened(folder: Path, **config: Any) -> Iterator[Engine]:
    """At the end, when no step is in flight, every page has as many holders as are counted (law 9)."""
    given: dict[str, Any] = {"kv_memory": 8_000_000, "max_model_len": 1024, "device": "cpu", "kv_dtype": "float32"}
    with Engine.open(folder, EngineConfig(**given | config)) as engine:
        yield engine
    engine.engine.planner.check()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with opened(folder) as engine:
        yield engine


def run(engine: Engine, *jobs: Job) -> list[tuple[list[int], list[Any], list[Any]]]:
    deltas = engine.generate(jobs)
    return [spoken(deltas[one.id]) for one in jobs]


ONE, TWO, CHUNK = picture(1), picture(2, 4, 10), picture(3, 4, 6, frames=3)
PARTS = text(1, 30), ONE, text(2, 41), TWO, text(3, 57), CHUNK, text(4, 9)


@torch.inference_mode()
def expected_logprobs(folder: Path, config: K2Config) -> Tensor:
    """transformers' text model over its own embeddings, and over the features of transformers' tower."""
    model = transformers_model(folder)
    weights = {name: values.float() for name, values in random_tensors(VISION)}
    rows: list[Tensor] = []
    for part in PARTS:
        if isinstance(part, Picture):
            data = part.data
            pixels = torch.frombuffer(bytearray(data.patches), dtype=torch.uint8).view(-1, 3, 14, 14).float()
            rows.append(
                their_features(VISION, weights, (pixels / 255 - 0.5) / 0.5, (data.frames, data.rows, data.columns))
            )
        else:
            rows.append(model.get_input_embeddings()(torch.tensor(part)))
    logits = model(inputs_embeds=torch.cat(rows)[None].to(torch.bfloat16).float(), use_cache=False).logits[0]
    assert logits.shape[-1] == config.vocab_size
    return logits.float().log_softmax(-1)


def test_the_log_probabilities_of_a_prompt_with_images_are_those_of_transformers(folder: Path, engine: Engine):
    expected = expected_logprobs(folder, Checkpoint.open(folder).config)
    ((_, _, found),) = run(engine, one := job("law 10", engine, *PARTS))
    assert len(found) == len(one.tokens) - 1
    for position, (row, token) in enumerate(zip(found, one.tokens[1:], strict=True)):
        assert row.token == token
        assert row.logprob == pytest.approx(float(expected[position, token]), abs=2e-3), position
        best = expected[position].topk(5)
        assert [each[1] for each in row.top] == pytest.approx(best.values.tolist(), abs=2e-3)


@pytest.mark.parametrize("step_tokens", [16, 33, 64])
def test_chunks_change_nothing(step_tokens: int, folder: Path, engine: Engine):
    """Law 2, with chunks that end within an image."""
    with opened(folder, step_tokens=step_tokens, max_running=4) as other:
        assert run(other, job("law 2", other, *PARTS)) == run(engine, job("law 2", engine, *PARTS))


ASKED = Sampling(max_tokens=24, temperature=0, logprobs=3)


def test_the_cache_changes_nothing_and_a_second_question_encodes_nothing(folder: Path):
    """Law 3: the second prompt begins as the first, image included."""
    with opened(folder) as engine:
        parts = text(1, 30), ONE, text(2, 41), TWO, text(3, 57)
        first = job("first", engine, *parts, sampling=ASKED)
        run(engine, first)
        features = engine.engine.features
        assert features is not None
        assert (features.encoded, features.reused) == (2, 0)
        engine.images.clear()  # pixels cannot be sent again
        second = job("second", engine, *parts, text(4, 20), sampling=ASKED)
        engine.images.clear()
        deltas = engine.generate([second])[second.id]
        assert deltas[-1].cached_tokens >= 64
        assert features.encoded == 2
        with opened(folder) as other:
            assert spoken(deltas) == run(other, job("alone", other, *parts, text(4, 20), sampling=ASKED))[0]


def test_another_image_at_the_same_place_is_another_prefix(engine: Engine):
    other = picture(3)
    found = run(
        engine,
        job("a", engine, text(1, 30), ONE, text(2, 90), sampling=ASKED),
        job("b", engine, text(1, 30), other, text(2, 90), sampling=ASKED),
    )
    assert found[0] != found[1]
    again = job("c", engine, text(1, 30), other, text(2, 90), sampling=ASKED)
    assert run(engine, again)[0] == found[1]


def test_company_does_not_matter(folder: Path, engine: Engine):
    """Law 7: a prompt alone, and among others with images of other sizes."""
    parts = text(1, 30), ONE, text(2, 41)
    (alone,) = run(engine, job("alone", engine, *parts, sampling=ASKED))
    with opened(folder) as other:
        pictures = [picture(seed, 2 * rows, 2 * columns) for seed, rows, columns in ((5, 1, 1), (6, 7, 3), (7, 2, 9))]
        company = [job(str(n), other, text(n, 50), each, sampling=ASKED) for n, each in enumerate(pictures)]
        assert run(other, *company, job("among", other, *parts, sampling=ASKED))[-1] == alone


@pytest.mark.parametrize("drafts", ["learned", "suffix"])
def test_drafts_change_nothing(drafts: str, folder: Path, engine: Engine):
    """Law 4. The prompt repeats itself around the image, so that suffix matches are found."""
    parts = *[text(8, 24), ONE] * 3, text(8, 12)
    (expected,) = run(engine, job("without", engine, *parts, sampling=ASKED))
    given = Learned(drafter=str(folder / "drafter"), adaptive=False) if drafts == "learned" else Suffix(adaptive=False)
    with opened(folder, speculation=given) as other:
        assert run(other, job("with", other, *parts, sampling=ASKED))[0] == expected


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=24, temperature=0.8, seed=4, seeded=True, repetition_penalty=1.3),
        Sampling(max_tokens=24, temperature=1.0, seed=4, seeded=True, presence_penalty=0.5, top_k=20),
    ],
    ids=["repetition", "presence"],
)
def test_penalties_take_an_image_for_image_tokens(sampling: Sampling, engine: Engine):
    """A penalty over the prompt reads its token ids, which are not rows of the feature table."""
    ((tokens, _, _),) = run(engine, job("penalty", engine, *PARTS, sampling=sampling))
    assert len(tokens) == 24


def test_images_that_do_not_fit_together_wait_for_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from redline.worker import engine as module

    monkeypatch.setattr(module, "IMAGE_TOKENS", 30)
    with opened(folder) as engine:
        pictures = [picture(seed, 8, 10) for seed in range(4)]  # 20 tokens each
        jobs = [job(str(n), engine, text(n, 40), each, text(n, 9), sampling=ASKED) for n, each in enumerate(pictures)]
        assert all(len(tokens) == 24 for tokens, _, _ in run(engine, *jobs))
        both = job("both", engine, pictures[0], pictures[1])
        (end,) = engine.generate([both])[both.id]
        assert end.error == "the images of the prompt take 40 tokens; at most 30 are encoded at a time"


def test_a_job_that_ends_while_its_image_is_awaited_leaves_nothing(folder: Path):
    with opened(folder) as engine:
        gone = job("gone", engine, text(1, 10), ONE, sampling=ASKED)
        engine.images.clear()
        with pytest.raises(KeyError):  # the engine's caller does not have the pixels: the job is aborted
            engine.generate([gone])
        features = engine.engine.features
        assert features is not None
        assert not features.busy
