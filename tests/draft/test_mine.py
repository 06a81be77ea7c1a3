"""Mining: difficult examples, the difficult positions in them, and the selection for training."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from redline.draft.corpus.corpus import Example, read_examples
from redline.draft.corpus.target import TargetModel
from redline.draft.corpus.traces import read_traces
from redline.draft.mine.buckets import Scored, buckets, rejections, since_control
from redline.draft.mine.choose import answer_tokens, choose, mix, uniform, weights, window
from redline.draft.mine.difficulty import Scores, Serving, compare, distribution, score, walk
from redline.draft.mine.mine import MineConfig
from redline.draft.mine.mine import run as mine
from redline.draft.mine.teacher_forcing import TeacherForcing, _like_lengths
from redline.errors import ConfigError
from redline.messages.job import Sampling
from redline.model.eagle3.module import Eagle3, Eagle3Config
from redline.model.k2.write import random_checkpoint
from tests.tiny_model import kernel_config, prompt

ONEHOT, SAMPLED = Serving("onehot"), Serving("sampled")
FLAT = torch.zeros(1, 8)
SHARP = torch.tensor([[9.0, 0, 0, 0, 0, 0, 0, 0]])


def gap(target: torch.Tensor, drafter: torch.Tensor, serving: Serving) -> float:
    accept, ceiling, _ = compare(distribution(target, serving), drafter, serving)
    return float(ceiling - accept)


# ------------------------------------------------------------------------------------------------------ difficulty


@pytest.mark.parametrize("serving", [ONEHOT, SAMPLED])
def test_a_flat_target_that_the_drafter_knows_has_no_gap(serving: Serving):
    assert gap(FLAT, FLAT, serving) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("serving", [ONEHOT, SAMPLED])
def test_a_sure_target_that_the_drafter_misses_has_the_whole_gap(serving: Serving):
    assert gap(SHARP, SHARP.roll(1, -1), serving) > 0.99


def test_a_flat_target_costs_a_one_hot_drafter_nothing_whatever_it_says_but_a_sampling_one_can_still_learn_it():
    assert gap(FLAT, SHARP, ONEHOT) == pytest.approx(0, abs=1e-6)
    assert gap(FLAT, SHARP, SAMPLED) > 0.8


def test_sampled_acceptance_is_one_minus_total_variation():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(5, 64, generator=generator), torch.randn(5, 64, generator=generator)
    accept, _, _ = compare(distribution(p, SAMPLED), q, SAMPLED)
    distance = (p.softmax(-1) - q.softmax(-1)).abs().sum(-1) / 2
    assert torch.allclose(accept, 1 - distance, atol=1e-6)


def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_it_and_temperature_0_one():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert torch.allclose(distribution(logits, Serving(top_p=0.7)), torch.tensor([[0.625, 0.375, 0, 0]]))
    assert distribution(logits, Serving(temperature=0)).tolist() == [[1, 0, 0, 0]]


# --------------------------------------------------------------------------------------------------- teacher forcing

V, PROMPT = 16, 3


def scored_sequence(tokens: list[int], steps: list[torch.Tensor]) -> Scores:
    """The states are logits here; the target is certain of every next token."""
    ids = torch.tensor(tokens)
    last = torch.nn.functional.one_hot(ids.roll(-1), V).float() * 20
    (found,) = score(
        ids, torch.arange(len(ids)) >= PROMPT, last, steps, [len(ids)],
        target=lambda x: x, drafter=lambda x: x, vocabulary=V, serving=Serving(own=True),
    )  # fmt: skip
    return found


def foretelling(tokens: list[int], steps: int) -> list[torch.Tensor]:
    """States of a drafter that is always right: row t of step j predicts token t + 2 + j."""
    return [torch.nn.functional.one_hot(torch.tensor(tokens).roll(-2 - j), V).float() for j in range(steps)]


def test_row_t_of_step_j_is_held_against_token_t_plus_2_plus_j(monkeypatch: pytest.MonkeyPatch):
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    monkeypatch.setattr("redline.draft.mine.difficulty.PIECE_BYTES", 3 * 4 * V)  # pieces of three rows change nothing
    found = scored_sequence(tokens, foretelling(tokens, 3))
    assert found.position_R.tolist() == [4, 5, 6, 7]  # the answer's first token, at 3, comes from the prompt
    assert found.hit_Rk.tolist() == found.there_Rk.tolist()
    assert found.there_Rk.sum(1).tolist() == [3, 3, 2, 1]
    assert found.longest_R.tolist() == pytest.approx([4, 4, 3, 2])


def test_sequences_behind_one_another_are_scored_as_each_alone(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    lengths = [8, 3, 1, 2, 12, 4]
    prompts = [3, 1, 1, 1, 3, 4]
    tokens = [torch.randint(V, (n,), generator=generator) for n in lengths]
    answers = [torch.arange(n) >= prompt for n, prompt in zip(lengths, prompts, strict=True)]
    last, *steps = ([torch.randn(n, V, generator=generator) for n in lengths] for _ in range(4))
    monkeypatch.setattr("redline.draft.mine.difficulty.PIECE_BYTES", 5 * 4 * V)

    def scored_together(places: list[int]) -> list[Scores]:
        def joined(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([parts[place] for place in places])

        return score(
            joined(tokens), joined(answers), joined(last), [joined(step) for step in steps],
            [lengths[place] for place in places],
            target=lambda x: x, drafter=lambda x: x, vocabulary=V, serving=Serving(),
        )  # fmt: skip

    together = scored_together(list(range(6)))
    for place, found in enumerate(together):
        (alone,) = scored_together([place])
        for field in ("position_R", "accept_Rk", "ceiling_Rk", "hit_Rk", "there_Rk"):
            assert np.array_equal(getattr(found, field), getattr(alone, field)), (place, field)
    assert [len(found.position_R) for found in together] == [4, 1, 0, 0, 8, 0]


def test_a_gpus_groups_of_like_lengths_find_what_one_sequence_at_a_time_finds(tmp_path: Path):
    random_checkpoint(tmp_path, kernel_config())
    target = TargetModel.open(tmp_path, torch.device("cpu"))
    torch.manual_seed(0)
    forcing = TeacherForcing(target, Eagle3(Eagle3Config.for_target(target.config, layer_ids=target.layer_ids)))
    examples = [
        Example(id=f"{n}", domain="d", tokens=prompt(n, length), prompt=length // 3 + 1, finish="stop")
        for n, length in enumerate((9, 40, 2, 41, 70, 12, 300))
    ]
    alone = list(forcing.scores(examples, 3, Serving()))
    forcing.together = 128
    assert _like_lengths(examples, 128) == [[6], [4], [3, 1, 5], [0, 2]]
    together = list(forcing.scores(examples, 3, Serving()))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one.position_R, other.position_R)
        assert np.array_equal(one.there_Rk, other.there_Rk)
        np.testing.assert_allclose(one.accept_Rk, other.accept_Rk, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(one.ceiling_Rk, other.ceiling_Rk, rtol=1e-3, atol=1e-6)


def test_a_drafter_that_is_right_one_token_late_never_hits():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    late = [state.roll(1, 0) for state in foretelling(tokens, 2)]
    assert not scored_sequence(tokens, late).hit_Rk.any()


def test_a_sequence_without_room_for_a_draft_has_no_rows():
    assert len(scored_sequence([1, 2, 3, 4], foretelling([1, 2, 3, 4], 2)).position_R) == 0


def test_rounds_are_foretold_as_serving_takes_them():
    hits = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 0], [0, 1, 0], [1, 1, 1], [1, 1, 0]], dtype=bool)
    there = np.array([[1, 1, 1]] * 4 + [[1, 1, 0], [1, 0, 0]], dtype=bool)
    floats = hits.astype(np.float32)
    found = Scores(np.arange(10, 16), floats, floats, hits, there)
    assert walk(found, 3) == [(10, 3, 2), (13, 3, 0), (14, 2, 2)]
    assert walk(found, 1) == [(10, 1, 1), (12, 1, 1), (14, 1, 1)]


# --------------------------------------------------------------------------------------------------------- buckets


def example(id: str, domain: str = "code", answer: int = 10, prompt: int = 5, language: str = "en") -> Example:
    tokens = tuple(range(prompt + answer))
    return Example(id=id, domain=domain, language=language, tokens=tokens, prompt=prompt, finish="stop")


def marked(one: Example, accept: float, ceiling: float = 1.0, rounds: tuple[tuple[int, int, int], ...] = ()) -> Scored:
    positions = np.arange(one.prompt + 1, len(one.tokens))
    full = np.ones((len(positions), 2), dtype=np.float32)
    scores = Scores(positions, full * accept, full * ceiling, full > 0, full > 0)
    since_start = positions - one.prompt + 1
    behind = since_control(one.tokens, frozenset({0}), positions)
    rejected = rejections(rounds, positions)
    return Scored(one.id, one.domain, one.language, answer_tokens(one), scores, since_start, behind, rejected)


def test_the_bucket_that_loses_most_over_all_traffic_stands_first():
    found = buckets([marked(example("a", "code", 40), 0.95), marked(example("b", "math", 10), 0.5)])
    math, code = (bucket for bucket in found if bucket.dimension == "domain")
    assert (math.name, code.name) == ("math", "code")
    assert found == sorted(found, key=lambda bucket: -bucket.cost)
    assert math.share == pytest.approx(9 / 48)
    assert math.lost == pytest.approx(2 - (0.5 + 0.25))
    assert math.cost == pytest.approx(math.share * math.lost, abs=1e-5)


def test_traffic_that_is_told_weighs_the_domains_whatever_the_corpus_holds():
    pair = [marked(example("a", "code", 40), 0.9), marked(example("b", "math", 10), 0.5)]
    shares = {b.name: b.share for b in buckets(pair, {"math": 3, "code": 1}) if b.dimension == "domain"}
    assert shares == {"math": 0.75, "code": 0.25}


def test_a_share_is_told_to_a_millionth():
    found = buckets([marked(example("a", "code", 11), 0.9), marked(example("b", "math", 21), 0.5)])
    shares = {b.name: b.share for b in found if b.dimension == "domain"}
    assert shares == pytest.approx({"code": 1 / 3, "math": 2 / 3}, abs=1e-6)


def test_positions_are_sorted_by_their_distance_from_the_start_and_from_control_tokens():
    found = buckets([marked(example("a", answer=31), 0.5)])
    since_start = {b.name: b.positions for b in found if b.dimension == "since start"}
    assert since_start == {"<= 4": 3, "5-16": 12, "17-64": 15}
    controls = since_control([7, 1, 2, 7, 3, 4], frozenset({7}), np.array([1, 3, 4, 5]))
    assert controls.tolist() == [1, 3, 1, 2]


def test_a_served_rejection_counts_twice_where_there_is_something_to_learn():
    one = example("a", answer=4)
    assert rejections([(6, 3, 1), (8, 1, 1)], np.array([6, 7, 8])).tolist() == [0, 1, 0]
    assert marked(one, 0.5, rounds=((6, 3, 1),)).hardness_R.tolist() == pytest.approx([0.5, 1.0, 0.5])
    assert marked(one, 0.5, ceiling=0.5, rounds=((6, 3, 1),)).hardness == 0


# ---------------------------------------------------------------------------------------------------------- choice


def pool() -> list[Scored]:
    hard = [marked(example(f"hard {i}", "math"), 0.2) for i in range(50)]
    return hard + [marked(example(f"easy {i}", "code"), 0.95) for i in range(50)]


def test_what_can_be_learned_is_chosen_more_often_and_never_beyond_the_budget():
    scored = pool()
    chosen = choose(scored, weights(scored, None, "gap"), 200, cap=1.0)
    assert sum(scored[place].answer for place in chosen) == 200
    assert sum(scored[place].domain == "math" for place in chosen) > 15


def test_no_bucket_takes_more_than_its_cap():
    scored = pool()
    chosen = choose(scored, weights(scored, None, "gap"), 200, cap=0.5)
    assert sum(scored[place].domain == "math" for place in chosen) <= 10


def test_equal_domains_have_equal_tokens():
    scored = pool()
    chosen = choose(scored, weights(scored, None, "gap"), 200, equal_domains=True)
    assert [sum(scored[place].domain == domain for place in chosen) for domain in ("math", "code")] == [10, 10]


def test_the_choice_is_the_seeds_and_not_the_orders():
    scored = pool()

    def ids(some: list[Scored], seed: int) -> list[str]:
        return [some[place].id for place in choose(some, weights(some, None, "gap"), 200, seed=seed)]

    assert ids(scored, 1) == ids(list(reversed(scored)), 1)
    assert ids(scored, 1) != ids(scored, 2)


def test_an_example_without_a_gap_is_never_chosen_but_by_the_control_arm():
    scored = [marked(example("known"), 0.3, ceiling=0.3), marked(example("new"), 0.3)]
    assert [scored[place].id for place in choose(scored, weights(scored, None, "gap"), 1000)] == ["new"]
    assert len(choose(scored, weights(scored, None, "uniform"), 1000)) == 2


def test_no_weight_is_more_than_five_times_the_mean():
    scored = [marked(example("rare", "rare", 1000), 0.0), *(marked(example(f"{i}"), 0.99) for i in range(100))]
    assert max(weights(scored, None, "gap")) == 5


def test_a_window_is_the_hardest_stretch_behind_all_of_its_context():
    one = example("a", answer=20)
    hardness = np.zeros(19)
    hardness[12:15] = 1  # positions prompt + 1 + 12 ...
    cut = window(one, hardness, 3)
    assert cut is not None
    assert (cut.prompt, cut.tokens) == (18, one.tokens[:21])
    assert window(one, hardness, 20) is None


def test_half_of_the_mix_is_replay_and_all_of_it_is_in_the_budget():
    base = [example(f"base {i}") for i in range(100)]
    hard = [example(f"hard {i}") for i in range(100)]
    mixed = mix(base, hard, 400, replay=0.5, equal_domains=False, seed=3)
    assert sum(map(answer_tokens, mixed)) == 400
    assert sum(one.id.startswith("base") for one in mixed) == 20
    assert mixed == mix(reversed(base), reversed(hard), 400, replay=0.5, equal_domains=False, seed=3)


def test_where_hard_ones_are_few_the_base_fills_up_and_where_the_base_is_small_all_is():
    base, hard = [example(f"base {i}") for i in range(10)], [example(f"hard {i}") for i in range(3)]
    mixed = mix(base, hard, 100, replay=0.5, equal_domains=False, seed=0)
    assert [sum(one.id.startswith(kind) for one in mixed) for kind in ("base", "hard")] == [7, 3]
    few = mix(base[:2], hard, 100, replay=0.5, equal_domains=False, seed=0)
    assert [sum(one.id.startswith(kind) for one in few) for kind in ("base", "hard")] == [2, 2]


def test_every_domain_has_as_many_tokens_as_the_others_in_an_equal_mix():
    base = [example(f"{domain} {i}", domain) for domain in ("code", "math", "chat") for i in range(50)]
    hard = [example(f"hard {i}", "math") for i in range(50)]
    mixed = mix(base, hard, 300, replay=0.5, equal_domains=True, seed=0)
    tokens = {
        domain: sum(answer_tokens(one) for one in mixed if one.domain == domain) for domain in ("code", "math", "chat")
    }
    assert tokens == {"code": 100, "math": 100, "chat": 100}


# ---------------------------------------------------------------------------------------------------------- traces


def test_traces_become_examples_and_a_bad_line_is_named(tmp_path: Path):
    good = {"id": "r1", "tokens": [1, 2, 3, 4, 5], "prompt": 2, "finish": "stop", "rounds": [[3, 2, 1]]}
    lines = [good, {**good, "rounds": [[9, 2, 1]]}, {**good, "prompt": 0}, {**good, "finish": "error"}]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), "{"]) + "\n")
    found = read_traces(str(path))
    (one,) = found.examples
    assert (one.tokens, one.prompt, one.rounds, one.domain) == ((1, 2, 3, 4, 5), 2, ((3, 2, 1),), "traffic")
    assert [message.split(": ")[0] for message in found.skipped] == [f"{path}, line {number}" for number in (2, 3, 5)]
    with pytest.raises(ConfigError, match="nowhere"):
        read_traces(str(tmp_path / "nowhere"))


def test_a_trace_has_the_domain_that_it_names_or_its_files(tmp_path: Path):
    line = {"id": "r", "tokens": [1, 2, 3], "prompt": 1, "finish": "stop", "rounds": []}
    for name in ("plain.jsonl", "a=b.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, (line, {**line, "domain": "law"}))))
    for named, domain in (
        (f"code={tmp_path / 'plain.jsonl'}", "code"),
        (str(tmp_path / "plain.jsonl"), "traffic"),
        (str(tmp_path / "a=b.jsonl"), "traffic"),
    ):
        assert [one.domain for one in read_traces(named).examples] == [domain, "law"]


def test_a_folder_mined_with_other_settings_is_refused_and_a_larger_batch_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("redline.draft.mine.mine.check_target", lambda folder, device: None)  # there is no target
    config = MineConfig(target="t", draft="d", out=str(tmp_path), corpus=("c",))
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(ConfigError, match="made with budget 1000000, not 5"):
        mine(msgspec.structs.replace(config, budget=5), Console())
    with pytest.raises(ConfigError, match="c: cannot be read"):  # the settings were accepted
        mine(msgspec.structs.replace(config, batch=8), Console())


def test_an_example_that_the_target_cannot_read_is_told_and_neither_scored_nor_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for kind in ("base", "traced"):
        lines = (msgspec.json.encode(example(f"{kind} {which}")) for which in ("good", "bad"))
        (tmp_path / f"{kind}.jsonl").write_bytes(b"\n".join(lines))
    traced = read_examples(tmp_path / "traced.jsonl")
    monkeypatch.setattr("redline.draft.mine.mine.read_traces", lambda *names: traced)
    monkeypatch.setattr("redline.draft.mine.mine.check_target", lambda folder, device: None)
    monkeypatch.setattr("redline.draft.mine.mine.generation_config_of", lambda folder: Sampling(max_tokens=1))
    refuses = SimpleNamespace(refusal=lambda one: "too long" if one.id.endswith("bad") else None)
    monkeypatch.setattr(TeacherForcing, "open", lambda *given: refuses)
    seen: list[str] = []

    def scores(examples: list[Example], *_: object) -> list[Scored]:
        seen.extend(one.id for one in examples)
        return [marked(one, 0.5) for one in examples]

    monkeypatch.setattr("redline.draft.mine.mine._score", scores)
    monkeypatch.setattr("redline.draft.mine.mine.drawn", lambda *given: None)
    screen, out = io.StringIO(), tmp_path / "out"
    config = MineConfig(target="t", draft="d", out=str(out), corpus=(str(tmp_path / "base.jsonl"),), answers=0)
    assert mine(config, Console(file=screen, width=500)) == 0
    assert seen == ["base good", "traced good"]
    assert [one.id for one in read_examples(out / "mixed.jsonl").examples] == ["base good"]
    assert "base bad: too long" in screen.getvalue()
    assert "traced bad: too long" in screen.getvalue()
    assert json.loads((out / "report.json").read_bytes())["skipped"] == 2


def test_a_draw_is_the_same_in_every_version_so_that_a_mining_goes_on_where_it_was():
    drawn = [uniform(id, seed) for id, seed in (("a", 0), ("a", 1), ("b", 0))]
    assert drawn == pytest.approx([0.827815, 0.070432, 0.093194], abs=1e-6)


def test_ids_are_drawn_evenly_and_a_seed_says_nothing_of_another():
    first, second = (np.array([uniform(f"{i}", seed) for i in range(4000)]) for seed in (1, 2))
    assert np.abs(np.histogram(first, 8, (0, 1))[0] - 500).max() < 120
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.08
