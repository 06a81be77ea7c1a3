"""An audit reports the loss of each part, and exits with 1 if it is too large."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from redline.cli.audit import run
from redline.cli.quantize import AuditConfig
from redline.draft.corpus.corpus import CorpusWriter, Example
from redline.draft.corpus.target import TargetModel
from redline.errors import ConfigError
from redline.model.k2.checkpoint import Checkpoint
from redline.model.k2.cpu import load
from redline.model.k2.write import random_checkpoint, tiny_config, write_checkpoint
from redline.quant.audit import Bounds, _Next, audit, relative
from redline.quant.quantize import run as run_quantize
from redline.quant.read import dense
from redline.quant.settings import QuantizeConfig
from redline.quant.stream import through
from redline.quant.texts import LONGEST, CalibrationText, chosen, halves

CPU = torch.device("cpu")
CONSOLE = Console(file=io.StringIO(), width=200)


def texts(*lengths: int, domains: tuple[str, ...] = ("code", "chat")) -> list[CalibrationText]:
    generator = torch.Generator().manual_seed(1)
    drawn = [tuple(torch.randint(3, 512, (length,), generator=generator).tolist()) for length in lengths]
    return [CalibrationText(domains[number % len(domains)], tokens) for number, tokens in enumerate(drawn)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model in INT4 and in NVFP4."""
    folder = tmp_path_factory.mktemp("pair")
    random_checkpoint(folder / "a", tiny_config())
    config = QuantizeConfig(source=str(folder / "a"), out=str(folder / "b"), device="cpu")
    assert run_quantize(config, CONSOLE) == 0
    return folder / "a", folder / "b"


def test_layer_by_layer_is_the_whole_model_to_the_bit(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    some = texts(5, 70, 130, 64)
    expected = TargetModel.open(pair[0], CPU).features([text.tokens for text in some])
    for tokens in (8192, 100):  # in one call, and in several
        monkeypatch.setattr("redline.quant.stream.CALL_TOKENS", tokens)
        given = through(Checkpoint.open(pair[0]), some, CPU)
        assert torch.equal(given.bfloat16(), torch.cat([states.last for states in expected]))


def test_a_listener_hears_what_every_layers_experts_read(pair: tuple[Path, Path]):
    heard: list[tuple[int, tuple[int, ...], bool]] = []
    checkpoint = Checkpoint.open(pair[0])
    through(
        checkpoint, texts(9, 3), CPU, lambda layer, x, ids, kept: heard.append((layer, tuple(x.shape), ids is None))
    )
    assert heard == [(0, (12, 64), True), (1, (12, 64), False), (2, (12, 64), False)]


def test_a_checkpoint_against_itself_has_lost_nothing(pair: tuple[Path, Path]):
    one = Checkpoint.open(pair[0])
    found = audit(one, Checkpoint.open(pair[0]), texts(40, 50), Bounds(weight=0, output=0, kl=0, agreement=1), CPU)
    assert (found.weights, found.excess) == ((), ())
    assert [(row.domain, row.tokens, row.kl, row.agreement) for row in found.domains] == [
        ("chat", 49, 0.0, 1.0),
        ("code", 39, 0.0, 1.0),
        ("all", 88, 0.0, 1.0),
    ]
    assert all(row.output == 0 for row in found.experts)


def test_the_figures_are_those_of_their_formulas(pair: tuple[Path, Path]):
    a, b = map(Checkpoint.open, pair)
    some = texts(60, domains=("code",))
    found = audit(a, b, some, Bounds(), CPU)
    assert {row.name.split(".")[-2] for row in found.weights} == {"gate_proj", "up_proj", "down_proj"}
    assert len(found.weights) == 2 * 8 * 3
    row = found.weights[7]
    was, now = (dense(of, _weight(row.name), CPU) for of in (a, b))
    assert row.error == pytest.approx(((was - now).norm() / was.norm()).item(), rel=1e-4)
    log_a, log_b = (_log_probabilities(of, some[0]) for of in (a, b))
    kl = (log_a.exp() * (log_a - log_b)).sum(-1)
    (code, whole) = found.domains
    assert code.kl == whole.kl == pytest.approx(kl.mean().item(), rel=1e-3)
    assert code.kl_99 == pytest.approx(kl.max().item(), rel=1e-3)
    assert code.agreement == (log_a.argmax(-1) == log_b.argmax(-1)).double().mean().item()
    following = torch.tensor(some[0].tokens[1:])[:, None]
    assert code.perplexity_b == pytest.approx(math.exp(-log_b.gather(1, following).mean().item()), rel=1e-3)


def test_an_experts_output_error_is_that_of_its_product(pair: tuple[Path, Path]):
    a, b = map(Checkpoint.open, pair)
    some = texts(200)
    found = audit(a, b, some, Bounds(), CPU)
    read: list[tuple[torch.Tensor, torch.Tensor]] = []

    def listen(layer: int, x: torch.Tensor, ids: torch.Tensor | None, kept: torch.Tensor) -> None:
        if layer == 1 and ids is not None:
            read.append((x, ids))

    through(a, some, CPU, listen)
    x = read[0][0][(read[0][1] == 3).any(1)]
    name = "layers.1.mlp.experts.3.up_proj.weight"
    was, now = (dense(of, _weight(name), CPU) for of in (a, b))
    expected = ((x @ was.T - x @ now.T).norm() / (x @ was.T).norm()).item()
    assert {row.name: row.output for row in found.weights}[name] == pytest.approx(expected, rel=1e-3)
    (expert,) = [row for row in found.experts if (row.layer, row.expert) == (1, 3)]
    assert expert.tokens == len(x)
    assert expected < expert.output < 4 * expected


def _weight(name: str):
    from redline.model.k2.checkpoint import CheckpointWeight

    return CheckpointWeight(name, (0, 0), "expert")


def _log_probabilities(checkpoint: Checkpoint, text: CalibrationText) -> torch.Tensor:
    model = load(checkpoint, CPU)
    return model.logits(through(checkpoint, [text], CPU)[:-1]).log_softmax(-1)


def test_a_broken_expert_is_named_and_the_exit_code_is_one(pair: tuple[Path, Path], tmp_path: Path):
    at = "language_model.model.layers.2.mlp.experts.5.down_proj.weight"
    tensors = {name: v for path in sorted(pair[1].glob("*.safetensors")) for name, v in load_file(path).items()}
    tensors[f"{at}_scale_2"] *= 2
    write_checkpoint(tmp_path / "c", tensors.items(), json.loads((pair[1] / "config.json").read_text()))
    corpus = tmp_path / "corpus.jsonl"
    with CorpusWriter(corpus) as writer:
        for number, text in enumerate(texts(*[40] * 12)):
            writer.append(Example(id=str(number), domain=text.domain, tokens=text.tokens, prompt=10, finish="stop"))
    for b, code in ((pair[1], 0), (tmp_path / "c", 1)):
        console = Console(file=io.StringIO(), width=200)
        config = AuditConfig(
            a=pair[0],
            b=b,
            text=(corpus,),
            tokens=10_000,
            most_kl=1,
            least_agreement=0.2,
            save=tmp_path / "audit.json",
            html=tmp_path / "audit.html",
            device="cpu",
        )
        assert run(config, console) == code
        said = console.file.getvalue()  # pyright: ignore
        assert ("weight of layers.2.mlp.experts.5.down_proj.weight" in said) == bool(code)
        assert ("output of layers.2.mlp.experts.5" in said) == bool(code)
        assert ("everything is within its bounds" in said) == (not code)
    saved = json.loads((tmp_path / "audit.json").read_text())
    assert saved["excess"][0]["of"] in ("layers.2.mlp.experts.5", "layers.2.mlp.experts.5.down_proj.weight")
    judged = len(halves(texts(*[40] * 12))[1]) * 30
    assert saved["domains"][-1]["tokens"] == judged
    page = (tmp_path / "audit.html").read_text()
    assert "Weight error by layer" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_another_model_is_refused(pair: tuple[Path, Path], tmp_path: Path):
    random_checkpoint(tmp_path, tiny_config(n_routed_experts=4))
    with pytest.raises(ConfigError, match="n_routed_experts is 8 in the first and 4 in the second"):
        audit(Checkpoint.open(pair[0]), Checkpoint.open(tmp_path), [], Bounds(), CPU)


def test_a_number_that_is_nan_is_beyond_every_bound(pair: tuple[Path, Path]):
    found = audit(*map(Checkpoint.open, pair), [], Bounds(weight=math.nan), CPU)
    assert len(found.excess) == 48
    assert relative(torch.zeros(2), torch.ones(2)) == math.inf
    assert relative(torch.zeros(2), torch.zeros(2)) == 0.0


def test_a_model_that_is_sure_of_wrong_tokens_has_an_infinite_perplexity(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """The perplexity exceeds the largest float of Python, for which exp raises; the audit once ended
    with a traceback.
    """
    log_probabilities = _Next.log_probabilities
    b = Checkpoint.open(pair[1])
    monkeypatch.setattr(_Next, "log_probabilities", lambda self, rows: 400 * log_probabilities(self, rows))
    found = audit(Checkpoint.open(pair[0]), b, texts(9, 7), Bounds(), CPU)
    assert found.domains[-1].perplexity_b == math.inf


def test_the_halves_share_no_text_whatever_the_order():
    some = texts(*range(2, 60))
    one, other = halves(some)
    assert len(one) + len(other) == len(some)
    assert min(len(one), len(other)) > 15
    assert halves(reversed(some))[0] == one[::-1]


def test_texts_are_taken_from_the_domains_in_turn_and_long_ones_are_cut():
    some = [*texts(*[10] * 20, domains=("code",)), *texts(10, 10, domains=("chat",))]
    assert [text.domain for text in chosen(some, 65, 512)] == ["code", "chat", "code", "chat", "code", "code"]
    long = CalibrationText("code", tuple(range(3, 500)) * 20, judged=LONGEST + 7)
    pieces = chosen([long], 10**6, 512)
    assert [len(piece.tokens) for piece in pieces] == [LONGEST, LONGEST, len(long.tokens) - 2 * LONGEST]
    assert [piece.judged for piece in pieces] == [LONGEST + 7, 7, 0]
    with pytest.raises(ConfigError, match="another tokenizer"):
        chosen(some, 65, 100)
    with pytest.raises(ConfigError, match="none that fits"):
        chosen(some, 5, 512)
