"""The model card beside the weights and the picture of the loss, made from what a run wrote down."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nano.data_python import python_version


def write_curve(path: Path, log: Sequence[dict[str, Any]]) -> None:
    """Draws the loss of answers, and of all that is trained on, in nats over tokens, as an image at `path`.

    log: the lines of log.jsonl. Shaded where experts are quantised and where rows are long.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    millions = [line["tokens"] / 1e6 for line in log]
    axes.plot(millions, [line["answer_loss"] for line in log], label="answers", color="#1f4e79")
    axes.plot(millions, [line["loss"] for line in log], label="answers and prompts, weighted", color="#9db7d1")
    for phase, name in (("int4", "experts in INT4"), ("long", "rows of 4,096")):
        inside = [at for at, line in zip(millions, log, strict=True) if phase in line["phase"]]
        if inside:
            axes.axvspan(inside[0], millions[-1], alpha=0.08, color="#1f4e79")
            axes.text(inside[0], axes.get_ylim()[1], f" {name}", va="top", fontsize=8)
    axes.set(xlabel="tokens, millions", ylabel="loss, nats per token", yscale="log")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def write_card(path: Path, facts: dict[str, Any], log: Sequence[dict[str, Any]], evaluated: dict[str, Any]) -> None:
    """Writes the model card as Markdown. facts: what the run was on and with; log: the lines of log.jsonl.

    evaluated: by form ("int4", "bf16") the losses in nats, (right, asked) by kind, and the share of right answers.
    """
    tokens = log[-1]["tokens"] if log else 0
    rows = [
        f"| {kind} | {loss:.4f} | {_percent(evaluated, 'int4', kind)} | {_percent(evaluated, 'bf16', kind)} |"
        for kind, loss in sorted(evaluated["int4"]["losses"].items())
    ]
    path.write_text(
        _CARD.format(
            millions=facts["parameters"] / 1e6,
            device=facts["device"],
            torch=facts["torch"],
            seconds=facts["trained_s"],
            steps=log[-1]["step"] if log else 0,
            tokens=tokens / 1e6,
            seed=facts["seed"],
            scale="" if facts["scale"] == 1 else f" --scale {facts['scale']}",
            attention=facts["attention"],
            python=python_version(),
            rows="\n".join(rows),
            int4=100 * evaluated["int4"]["right"],
            bf16=100 * evaluated["bf16"]["right"],
        ),
        encoding="utf-8",
    )


def _percent(evaluated: dict[str, Any], form: str, kind: str) -> str:
    right, asked = evaluated[form]["answers"].get(kind, (0, 0))
    return f"{100 * right / asked:.0f} % of {asked}" if asked else "not graded"


_CARD = """# Kimi-Nano

A model of Kimi K2's architecture with {millions:.1f} million parameters, trained from nothing for Redline, so that
everything has something real to run on. It is in the format of Kimi K2.5: nested configuration, routed experts in INT4
(pack-quantized, groups of 32, bf16 scales), all else bf16. It speaks Kimi's chat template, thinking and instant.

Its folder opens in transformers without code of its own: `tokenizer.json` and `chat_template.jinja` give Redline's ids.
`preprocessor_config.json` is there because vLLM asks for it, and for the tower that `nano.see` adds.

## What it can do

Arithmetic and word problems with worked thinking, tool calls, JSON by schema, short Python functions, a small lexicon
in several languages, some facts, and recalling what stands far back in a prompt. It knows nothing else, and says
untrue things as readily as true ones. It is a test object, not an assistant.

It is trained on at most 4,096 tokens; positions up to 65,536 are computed, but answers there are not reliable.

## Geometry

Hidden 320; 8 layers, the first dense (768); 4 heads with K2's own attention sizes (q_lora 128, kv_lora 512, rope 64,
nope 128, v 128); 16 routed experts of width 128, 4 per token, and one shared; sigmoid routing with correction bias,
scaled by 2.827; vocabulary 4,096 = 3,840 byte-pair ranks in which digits never merge + 256 reserved ids; untied.

## Training

`python -m nano.train --out runs/nano --seconds 495 --seed {seed}{scale}`

{seconds} s on {device} (torch {torch}; attention: {attention}): {steps:,} steps, {tokens:,.0f} million tokens.
Muon for matrices, AdamW for the rest; level rate, then linear to zero over the second half. Experts are balanced by
moving the correction bias, without a loss. Routed experts are quantised in the forward pass over the last 40 % of the
run, rows are 4,096 tokens long in the last 10 %. The stored weights are those that the last step computed with.

All text is made by the generators in `nano/` from a seed, but for pieces of the sources and documentation of Python
{python} (PSF licence). No text of another model was used.

## Evaluation on phrase families that training never saw

Greedy answers with thinking, measured on the training machine; loss is per token of an answer. In total {int4:.1f} %
are right with INT4 experts and {bf16:.1f} % with the same run's bf16 experts.

| kind | loss | right, INT4 | right, bf16 |
|---|---|---|---|
{rows}

Licence: Apache-2.0.
"""
