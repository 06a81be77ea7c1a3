"""What it brings to draft the tokens that a grammar forces: steps of an answer and tokens/s, with it and without.

    python -m redline.bench.runs.forced [models/kimi-nano] [--draft models/kimi-nano-eagle3] [--rounds 7]

Answers to JSON schemas with long fixed keys, on this machine's CPU: greedy, through the whole engine in this process,
without speculation, with suffix matches, and with a drafter. With and without take turns on the same questions, and
both give the same tokens, or the program ends with 1. Without means that the planner asks for none of them; where
drafts are asked for anyway, those may be forced ones too. A rate counts from the first token of every answer to the
last of all, by the clock and by the processor's seconds of this process, which other users of the machine change less;
ratios are of neighbours, and the median counts. White space between the parts of JSON is the model's choice, as served,
or fixed.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from redline import clock
from redline.bench.program import output, program
from redline.bench.record import provenance
from redline.chat.constraint import Calls, Constraint, compose
from redline.chat.conversation import Conversation, Message
from redline.chat.hashing import make_job
from redline.chat.template import encode
from redline.wire.delta import Delta
from redline.wire.job import Job, JobId, Sampling
from redline.worker.config import DraftConfig, EngineConfig, Learned, Suffix
from redline.worker.engine import Engine

ANSWER = 300  # tokens of an answer, at most
BATCHES = 1, 8
PAGES = 256 << 20  # bytes


FIXED = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "order": (
        "A customer orders 3 chairs and pays by card. Return the order as JSON.",
        _object(
            customer_identification_number={"type": "integer", "minimum": 0, "maximum": 99999},
            number_of_items_in_this_order={"type": "integer", "minimum": 0, "maximum": 999},
            preferred_method_of_payment={"enum": ["card", "invoice", "cash"]},
            payment_has_been_confirmed={"type": "boolean"},
            requested_delivery_date={"type": "string", "format": "date"},
        ),
    ),
    "weather": (
        "It is 21 degrees in Zurich, with rain at night. Return the weather report as JSON.",
        _object(
            name_of_the_city={"type": "string", "maxLength": 30},
            temperature_in_degrees_celsius={"type": "number", "minimum": -90, "maximum": 60},
            probability_of_precipitation={"enum": ["low", "medium", "high"]},
            warnings_have_been_issued={"type": "boolean"},
        ),
    ),
    "ticket": (
        "The printer on floor 2 does not print since Monday. Return a support ticket as JSON.",
        _object(
            short_description_of_the_problem={"type": "string", "maxLength": 60},
            affected_device_category={"enum": ["printer", "laptop", "phone", "network"]},
            severity_on_a_scale_from_one_to_five={"type": "integer", "minimum": 1, "maximum": 5},
            location_of_the_device=_object(
                building_identifier={"type": "string", "maxLength": 10},
                floor_number={"type": "integer", "minimum": 0, "maximum": 99},
            ),
        ),
    ),
    "book": (
        "Return the novel 'Emma' by Jane Austen, from 1815, as JSON.",
        _object(
            title_of_the_publication={"type": "string", "maxLength": 40},
            full_name_of_the_author={"type": "string", "maxLength": 40},
            year_of_first_publication={"type": "integer", "minimum": 1000, "maximum": 2100},
            available_in_other_languages={"type": "boolean"},
        ),
    ),
}
"""By name: the question, and the schema of its answer."""


class Once(NamedTuple):
    """What came of every question."""

    steps: int
    tokens: int
    ended: int  # answers that their grammar has ended
    drafted: int  # forced tokens that were
    counted: int  # tokens behind the moment when all of a wave had begun
    seconds: float  # that they took
    busy: float  # of the processor, meanwhile
    texts: dict[str, tuple[int, ...]]  # each answer's tokens


class Asker:
    """Asks one engine, which does nothing else."""

    def __init__(self, engine: Engine, *, fixed: bool) -> None:
        """fixed: whether white space is."""
        self._engine = engine
        self._times = itertools.count()
        self._questions = {name: self._question(*asked, fixed=fixed) for name, asked in ASKED.items()}

    def _question(self, text: str, schema: dict[str, Any], *, fixed: bool) -> tuple[tuple[int, ...], Sampling]:
        engine = self._engine
        asked = Conversation(messages=(Message(role="user", content=text),), thinking=False)
        kind, written = (
            ("grammar", f"start: %json {json.dumps({**schema, **FIXED})}")
            if fixed
            else ("json_schema", json.dumps(schema))
        )
        constraint = Constraint(kind=kind, text=written, param="schema")
        composed = compose(constraint, Calls(), asked, engine.tokenizer, thinks=False)
        assert composed is not None, "there is a constraint"
        stops = engine.tokenizer.stop_ids
        sampling = Sampling(max_tokens=ANSWER, temperature=0.0, stop_ids=stops, grammar=composed.grammar)
        return tuple(encode(asked, engine.tokenizer, engine.style)), sampling

    def ask(self, batch: int) -> Once:
        """Every question, twice where `batch` is more than there are: so many at once, wave after wave."""
        names = [f"{name} {number}" for number in range(-(-batch // len(ASKED))) for name in ASKED]
        waves = [self._wave(names[first : first + batch]) for first in range(0, len(names), batch)]
        texts = {name: text for wave in waves for name, text in wave.texts.items()}
        return Once(*(sum(column) for column in list(zip(*waves, strict=True))[:-1]), texts=texts)

    def _wave(self, names: Sequence[str]) -> Once:
        salt, jobs = str(next(self._times)), list[Job]()
        for name in names:
            tokens, sampling = self._questions[name.split()[0]]
            jobs.append(make_job(JobId(name), tokens, sampling, self._engine.fingerprint, salt=salt))
        waiting, counted = {job.id for job in jobs}, 0
        begun = end = busy = busy_end = 0.0

        def note(delta: Delta) -> None:
            nonlocal begun, busy, counted, end, busy_end
            end, busy_end = clock.perf_counter(), clock.process_time()
            if waiting:
                waiting.discard(delta.job)
                begun, busy = end, busy_end
            else:
                counted += len(delta.tokens)

        planner = self._engine.engine.planner
        before = planner.load()
        deltas = self._engine.generate(jobs, note)
        after = planner.load()
        texts = {str(id): tuple(token for delta in told for token in delta.tokens) for id, told in deltas.items()}
        return Once(
            steps=after.steps - before.steps,
            tokens=sum(map(len, texts.values())),
            ended=sum(told[-1].finish == "stop" for told in deltas.values()),
            drafted=after.grammar_draft_tokens - before.grammar_draft_tokens,
            counted=counted,
            seconds=end - begun,
            busy=busy_end - busy,
            texts=texts,
        )


def compare(asker: Asker, batch: int, rounds: int) -> dict[str, Any]:
    """With and without, in turns, so many rounds behind one that warms up."""
    withs: list[Once] = []
    withouts: list[Once] = []
    for number in range(rounds + 1):
        for forced in (True, False) if number % 2 else (False, True):
            if forced:
                withs.append(asker.ask(batch))
            else:
                with patch("redline.plan.speculation.MOST_FORCED", 0):
                    withouts.append(asker.ask(batch))
    withs, withouts = withs[1:], withouts[1:]
    pairs = list(zip(withs, withouts, strict=True))

    def told(some: list[Once]) -> dict[str, float]:
        return {
            "steps": statistics.median(one.steps for one in some),
            "forced_drafts": statistics.median(one.drafted for one in some),
            "tokens_per_s": round(statistics.median(one.counted / one.seconds for one in some), 1),
            "tokens_per_busy_s": round(statistics.median(one.counted / one.busy for one in some), 1),
        }

    def times(ratios: list[float]) -> dict[str, float]:
        low, high = min(ratios), max(ratios)
        return {"median": round(statistics.median(ratios), 3), "least": round(low, 3), "most": round(high, 3)}

    return {
        "batch": batch,
        "rounds": rounds,
        "answers": len(withs[0].texts),
        "ended": withs[0].ended,
        "tokens": withs[0].tokens,
        "same_tokens": all(one.texts == withs[0].texts for one in (*withs, *withouts)),
        "with": told(withs),
        "without": told(withouts),
        "times_tokens_per_s": times([(a.counted / a.seconds) / (b.counted / b.seconds) for a, b in pairs]),
        "times_tokens_per_busy_s": times([(a.counted / a.busy) / (b.counted / b.busy) for a, b in pairs]),
    }


def main() -> int:
    """Measures, prints and writes. 1 where an answer was not the same with and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, nargs="?", default=Path("models/kimi-nano"))
    parser.add_argument("--draft", type=Path, default=Path("models/kimi-nano-eagle3"), help="a drafter for it")
    parser.add_argument("--rounds", type=int, default=7, help="of each kind")
    parser.add_argument("--out", type=output, default="runs/forced-cpu.json", help="the JSON to write")
    asked = parser.parse_args()
    kinds: dict[str, DraftConfig | None] = {
        "no speculation": None,
        "suffix": Suffix(),
        "drafter": Learned(drafter=str(asked.draft)),
    }
    result: dict[str, Any] = {
        "what": "answers to JSON schemas with long fixed keys, with the forced tokens drafted and without",
        **provenance("llguidance", "torch"),
        "load_average": round(os.getloadavg()[0], 1),
        "model": asked.weights.name,
        "questions": {name: text for name, (text, _) in ASKED.items()},
    }
    for kind, speculation in kinds.items():
        config = EngineConfig(kv_memory=PAGES, max_model_len=1024, max_running=8, device="cpu", speculation=speculation)
        with Engine.open(asked.weights, config) as engine:
            result[kind] = [
                {
                    "white_space": "fixed" if fixed else "free",
                    **compare(Asker(engine, fixed=fixed), batch, asked.rounds),
                }
                for fixed in (False, True)
                for batch in BATCHES
            ]
        print(kind, json.dumps(result[kind], indent=2), flush=True)
    asked.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return 0 if all(one["same_tokens"] for kind in kinds for one in result[kind]) else 1


if __name__ == "__main__":
    program(main)
