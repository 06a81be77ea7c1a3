"""Drawings with questions, the batches made of them, and the tower that is trained in front of nano."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from nano import see
from nano.attention import layout_of
from nano.config import MEDIA_PLACEHOLDER, NANO
from nano.data_pictures import ASKED, CAPTION_WORDS, COLOURS, CORNERS, KINDS, LONGEST, NUMBERS, SHAPES, drawing
from nano.export import stacks_of
from nano.model import Moe, angles, effective, layers, moe_layer
from nano.sample import Split
from redline.chat.tokenizer import Tokenizer
from redline.media.rules import ImageRules
from redline.model.k2.checkpoint import Checkpoint
from redline.model.vision.config import PROJECTOR, TOWER, VisionConfig
from redline.model.vision.load import load_tower
from redline.model.vision.tower import Grid, VisionTower

MODEL = Path("models/kimi-nano")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(MODEL)


@pytest.mark.parametrize("split", ["train", "values", "families"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawing_has_its_answer_in_its_reasoning_and_a_wording_of_its_split(kind: str, split: Split):
    rng, answers = random.Random(f"{kind} {split}"), Counter[str]()
    held = {wording.lower().strip("?.") for wording in ASKED[kind].held}
    for _ in range(60):
        one = next(one for _ in range(20) if (one := drawing(rng, split, kind, (112, 84))).kind == kind)
        assert [picture.size for picture in one.pictures] == [(112, 84)] * (2 if kind == "two" else 1)
        assert one.answer.lower() in one.reasoning.lower()
        answers[one.answer] += 1
        if kind in ("shape", "size", "word", "bars"):
            assert (one.question.lower().strip("?.") in held) == (split == "families")
    assert max(answers.values()) < 60
    known = {"shape": SHAPES, "size": SHAPES, "count": NUMBERS, "place": CORNERS, "two": ("first", "second")}
    assert not set(answers) - set(known.get(kind, answers))


@pytest.mark.parametrize("kind", KINDS)
def test_a_caption_says_what_its_picture_shows(kind: str):
    rng = random.Random(kind)
    for _ in range(60):
        one = next(one for _ in range(20) if (one := drawing(rng, "train", kind, (112, 84))).kind == kind)
        assert len(one.captions) == len(one.pictures)
        assert not {word for caption in one.captions for word in caption} - set(CAPTION_WORDS)
        assert max(map(len, one.captions)) <= LONGEST
        said = one.captions[one.answer == "second"]
        match kind:
            case "word":
                assert "".join(said) == f'"{one.answer}"'
            case "size":
                assert said[-2:] == ["larger", one.answer]
            case "place":
                assert " ".join(said[1:]).find(f"{one.answer}") > 0
            case "two":
                shown = {" ".join(caption[1:3]) for caption in one.captions}
                assert len(shown) == 2
                assert " ".join(said[1:3]) in one.reasoning
            case _:
                assert one.answer in said


@pytest.mark.parametrize("kind", ["shape", "colour", "place", "size"])
def test_an_earlier_question_is_of_another_kind_and_about_the_same_picture(kind: str):
    rng = random.Random(f"earlier {kind}")
    drawn = [drawing(rng, "train", kind, (112, 84)) for _ in range(80)]
    chats = [one for one in drawn if one.earlier is not None]
    assert 8 <= len(chats) < 50
    for one in chats:
        assert one.earlier is not None
        said = one.captions[0]
        for answer in (one.answer, one.earlier[1]):
            assert answer in NUMBERS or answer in " ".join(said)
    assert {one.kind for one in chats} > {kind}, "the kind that was asked for may come first or second"
    held_out: tuple[Split, ...] = ("values", "families")
    asked_once = [drawing(rng, split, kind, (112, 84)) for split in held_out for _ in range(20)]
    assert not [one for one in asked_once if one.earlier]


@pytest.mark.parametrize("kind", KINDS)
def test_drawings_vary_unless_they_are_plain(kind: str):
    """Plain ones have hard edges, so few colours; others have more in some pictures. All have the size asked for."""
    colours: dict[bool, int] = {}
    for plain in (True, False):
        rng = random.Random(f"vary {kind}")
        drawn = [drawing(rng, "train", kind, (101, 97), plain=plain).pictures[0] for _ in range(30)]
        assert {picture.size for picture in drawn} == {(101, 97)}
        colours[plain] = max(len(picture.getcolors(10_000) or range(10_000)) for picture in drawn)
    assert colours[False] > 2 * colours[True]


@pytest.mark.parametrize("across", [4, 7])
def test_sizes_of_drawings_take_the_tokens_asked_for(across: int):
    rng, rules = random.Random(4), ImageRules()
    sizes = {see.pixels_of(rng, across, 5) for _ in range(60)}
    assert {rules.layout(*size)[2:] for size in sizes} == {(10, 2 * across, 5 * across)}
    assert len(sizes) > 20
    assert (28 * across, 140) in sizes


def test_pictures_that_take_other_tokens_make_no_batch(tokenizer: Tokenizer):
    rng = random.Random(6)
    sizes = (112, 112), (100, 90), (85, 112)
    batch = see.batch_of(tokenizer, [drawing(rng, "train", "shape", size) for size in sizes])
    assert batch.patches.shape == (3, 64, 3, 14, 14)
    assert (batch.patches[2].view(8, 8, 3, 14, 14)[:, 7] == 0).all(), "what a picture does not fill is black"
    with pytest.raises(ValueError, match="unpack"):
        see.batch_of(tokenizer, [drawing(rng, "train", "shape", size) for size in ((112, 112), (113, 112))])


def test_a_caption_names_things_from_the_top_left():
    rng = random.Random(3)
    said = [drawing(rng, "train", "place", (168, 168)).captions[0] for _ in range(40)]
    three = next(caption for caption in said if caption[0] == "three")
    assert len(three) == 1 + 3 * 4 + 2
    assert [three[at] in COLOURS for at in (1, 5, 9)] == [True] * 3
    places = [CORNERS.index(" ".join(three[at : at + 2])) for at in (3, 7, 11)]
    assert places == sorted(places)


def test_words_of_the_split_values_are_never_written_in_training():
    rng = random.Random(4)
    written: dict[Split, set[str]] = {
        split: {drawing(rng, split, "word", (168, 112)).answer.lower() for _ in range(400)}
        for split in ("train", "values")
    }
    assert not written["train"] & written["values"]


def test_a_batch_learns_the_answer_behind_the_pictures(tokenizer: Tokenizer):
    rng = random.Random(5)
    drawings = [drawing(rng, "values", "two", (112, 168)) for _ in range(3)]
    batch = see.batch_of(tokenizer, drawings)
    tokens = ImageRules().layout(112, 168).tokens
    assert batch.patches.shape == (6, batch.rows * batch.columns, 3, 14, 14)
    for one, ids, loss in zip(drawings, batch.ids, batch.loss, strict=True):
        assert (ids == MEDIA_PLACEHOLDER).sum() == 2 * tokens
        learnt = [int(ids[place + 1]) for place in range(len(ids)) if loss[place]]
        assert one.thinking
        assert tokenizer.decode_bytes(learnt).decode() == f"{one.reasoning}</think>{one.answer}<|im_end|>"
    assert [CAPTION_WORDS[word] for word in batch.said[1] if word] == drawings[0].captions[1]


def test_a_word_that_was_read_is_spelled(tokenizer: Tokenizer):
    one = drawing(random.Random(6), "values", "word", (112, 112))
    batch = see.batch_of(tokenizer, [one])
    learnt = [int(batch.ids[0, place + 1]) for place in range(batch.ids.shape[1]) if batch.loss[0, place]]
    assert tokenizer.decode_bytes(learnt).decode() == f"{one.reasoning}</think>{one.answer}<|im_end|>"
    assert [tokenizer.decode_bytes([token]).decode() for token in learnt[-1 - len(one.answer) : -1]] == [*one.answer]


def test_a_vector_of_a_caption_knows_its_place_and_the_two_words_before(tokenizer: Tokenizer):
    language = see.Language.initial(tokenizer, torch.randn(4096, 320))
    with torch.no_grad():
        language.before.copy_(torch.randn(language.before.shape))
        language.places.copy_(torch.randn(language.places.shape))
    said = torch.tensor([[5, 7, 9, *[0] * 17]])
    given = language.say(said)[0]
    first, second = language.before
    torch.testing.assert_close(given[2], language.words[9] + first[7] + second[5] + language.places[2])
    torch.testing.assert_close(given[0], language.words[5] + first[0] + second[0] + language.places[0])
    torch.testing.assert_close(given[16], given[19])


def test_the_loss_of_a_caption_is_least_where_its_words_are_given(tokenizer: Tokenizer):
    g = torch.Generator().manual_seed(2)
    language = see.Language.initial(tokenizer, torch.randn(4096, 320, generator=g) * see.SPREAD)
    said = torch.zeros(2, 20, dtype=torch.int64)
    said[0, :4], said[1, :2] = torch.tensor([30, 9, 16, 4]), torch.tensor([2, 12])
    with torch.no_grad():
        language.before.copy_(torch.randn(language.before.shape, generator=g))
        language.places.copy_(torch.randn(language.places.shape, generator=g))
        given = language.say(said)
        loss, right = language.loss(given, said)
        assert right.all()
        assert loss < 0.01
        given[1, 1] += language.words[9] - language.words[12]
        worse, right = language.loss(given, said)
        assert right.tolist() == [True, False]
        assert worse > loss


@pytest.mark.parametrize("size", [(112, 112), (224, 168)])
def test_the_graph_of_training_is_the_tower(size: tuple[int, int]):
    weights = see.initial_tower(7)
    layout = ImageRules().layout(*size)
    g = torch.Generator().manual_seed(8)
    patches = torch.randint(256, (2, layout.rows * layout.columns, 3, 14, 14), generator=g, dtype=torch.uint8)
    tower = VisionTower(see.VISION, weights)
    pixels = (patches.float() / 255 - 0.5) / 0.5
    want = torch.cat([tower.encode(one, Grid(1, layout.rows, layout.columns)) for one in pixels])
    got = see.features(weights, patches, layout.rows, layout.columns)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_experts_that_compute_their_own_tokens_only_are_the_experts():
    masters, bias = stacks_of(MODEL)
    text = effective(masters, False, torch.float32)
    layer = layers(NANO, text, bias)[1]
    assert isinstance(layer.mlp, Moe)
    x_TD = torch.randn(24, NANO.hidden_size, generator=torch.Generator().manual_seed(1)) * see.SPREAD
    layout = layout_of(torch.arange(24) % 12 == 0, 12, "causal", 2)
    given = x_TD, NANO, layer.attention, layer.mlp, *angles(NANO, layout.positions), layout
    for ours, theirs in zip(see.moe_layer_of_few(*given), moe_layer(*given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_step_moves_the_tower_alone_and_the_folder_keeps_the_text_model(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = see.Run(MODEL, tmp_path, seed=1, scale=0.01, read=1.0, kinds=["colour"], workers=0)
    rng = random.Random(9)
    batch = see.batch_of(tokenizer, [drawing(rng, "train", "colour", (56, 56)) for _ in range(2)])
    words = run.language.words.detach().clone()
    before = {name: value.detach().clone() for name, value in run.tower.items()}
    first = run.learn_words(batch, 0.1)["loss"]
    assert run.learn_words(batch, 0.0)["loss"] < first
    assert not torch.equal(run.language.words, words)
    words = run.language.words.detach().clone()
    first = run.look(batch, 0.1, answering=False)["caption_loss"]
    second = run.look(batch, 0.1, answering=True)
    assert second["caption_loss"] < first
    assert run.look(batch, 0.0, answering=True)["loss"] < second["loss"]
    assert torch.equal(run.language.words, words)
    assert not any(torch.equal(run.tower[name], value) for name, value in before.items() if "wqkv.weight" in name)
    monkeypatch.setattr(see, "EVALUATED", 16)
    run.finish()
    shares = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert set(shares) == {"right", "told"}
    assert all(set(splits) == set(see.SPLITS) for splits in shares.values())
    ours, theirs = (Checkpoint.open(folder) for folder in (tmp_path / "kimi-nano", MODEL))
    stored = {name: tensor for file in ours.files.values() for name, tensor in file.items()}
    for file in theirs.files.values():
        for name, tensor in file.items():
            if name.startswith((TOWER, PROJECTOR)):
                continue
            assert torch.equal(ours.raw(stored[name]), theirs.raw(tensor)), name
    config = json.loads((tmp_path / "kimi-nano" / "config.json").read_text())
    assert VisionConfig.from_dict(config, see.VISION.text_hidden) == see.VISION
    tower = load_tower(ours, see.VISION, torch.device("cpu"))
    grid = Grid(1, batch.rows, batch.columns)
    pixels = (batch.patches[0].float() / 255 - 0.5) / 0.5
    want = see.features(run.tower, batch.patches[:1], batch.rows, batch.columns)
    assert (tower.encode(pixels, grid) - want).norm() < 0.02 * want.norm()
    (tmp_path / "more").mkdir()
    more = see.Run(MODEL, tmp_path / "more", 2, 0.01, 1.0, ["colour"], workers=0, start=tmp_path)
    more.log_file.close()
    assert more.first == see.WORDS
    assert all(torch.equal(more.tower[name], value) for name, value in run.tower.items())
    assert all(map(torch.equal, more.language, run.language))
