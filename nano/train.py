"""Trains Kimi-Nano, whole, from nothing: one command, one GPU, under nine minutes.

    python -m nano.train --out runs/nano --seconds 495                  on one H200
    python -m nano.train --out runs/small --seconds 120 --scale 0.01    a rehearsal on a CPU

Phases follow the clock, so a run always ends in time: the rate falls over the second half, routed experts are
quantised to INT4 in the last 40 %, and rows are 4,096 tokens long in the last 10 %. OUT then holds the checkpoint
(kimi-nano), the experts before quantisation (experts-bf16), log.jsonl, loss.png and evaluation.json.
"""

import time

BEGAN = time.perf_counter()  # before the slow imports: they count as training time

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
from collections import deque  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from nano.attention import choose, layout_of  # noqa: E402
from nano.card import write_card, write_curve  # noqa: E402
from nano.config import NANO  # noqa: E402
from nano.data import ANSWER, DOCUMENTS_PER_ROW, LONG_ROW, PROMPT, ROW, Encoder, Pool, evaluation  # noqa: E402
from nano.evaluate import ANSWER_TOKENS, Model, Unpacked, answers, held_out_loss, table, unpack  # noqa: E402
from nano.export import export, export_experts  # noqa: E402
from nano.model import Compiled, Weights, effective, entropy_of, forward, initial_weights, mean_loss  # noqa: E402
from nano.optim import Optimizer, balance, schedule  # noqa: E402
from nano.tokenizer import TOKENIZER_FILES  # noqa: E402
from redline.chat.tokenizer import Tokenizer  # noqa: E402

TOKENS_PER_STEP = 131_072
INT4_FROM = 0.6
LONG_FROM = 0.9
SAFETY_AT = 0.8  # an early export, in case that the machine does not last
BALANCE_RATE = 1e-3
PER_KIND = 64  # prompts that are asked at the end


def main() -> None:
    """The command line above: trains, exports, measures, and writes all of OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=495, help="from the start to the last step; then 40 s more")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tokens per step and the prompts at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, default=Path("models/kimi-nano"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    # Before anything touches the device: workers are forked, and start while the rest compiles.
    pool = Pool(arguments.tokenizer, arguments.seed)
    run = Run(pool, arguments.seed, arguments.scale, arguments.out, arguments.tokenizer)
    run.train(arguments.seconds)
    pool.close()
    run.finish()


class Run:
    """The state of one training: masters, optimiser, balance of the experts, and the log.

    scale: of the tokens per step and of the prompts at the end; 1 on a GPU, less for a rehearsal.
    """

    def __init__(self, pool: Pool, seed: int, scale: float, out: Path, tokenizer: Path) -> None:
        self.pool, self.scale, self.out, self.seed = pool, scale, out, seed
        self.tokenizer_folder = tokenizer
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        # On a CPU, cores that draw data are not free to multiply.
        if self.device.type == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 2) - len(pool.workers)))
        self.way, reason = choose(self.device, NANO.num_attention_heads, NANO.qk_head_dim)
        self.code = Compiled.on(self.device)
        self.masters = {name: w.to(self.device).requires_grad_() for name, w in initial_weights(NANO, seed).items()}
        self.bias = torch.zeros(NANO.moe_layers, NANO.n_routed_experts, device=self.device)
        self.optimizer = Optimizer(self.masters)
        self.step = self.tokens = 0
        self.trained = 0.0  # seconds
        self.log: list[dict[str, Any]] = []
        self.log_file = (out / "log.jsonl").open("w")
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        parameters = sum(w.numel() for w in self.masters.values())
        self.facts = {
            "device": device,
            "torch": torch.__version__,
            "attention": f"{self.way} ({reason})",
            "parameters": parameters,
            "tokens_per_step": round(TOKENS_PER_STEP * scale),
            "workers": len(pool.workers),
            "seed": seed,
            "scale": scale,
        }
        self._write(self.facts)

    def train(self, seconds: float) -> None:
        """Takes steps until `seconds` after the start of the process, and exports once at SAFETY_AT of the time."""
        loss = self._first_step()
        begin, printed = _now(), _now()
        printed_tokens, saved, waiting = self.tokens, False, deque[Any]()
        while (now := _now()) < seconds:
            progress = (now - begin) / (seconds - begin)
            loss = self._train_step(progress)
            # At most two steps are under way, so that the clock and the device stay together.
            if self.device.type == "cuda":
                waiting.append(torch.cuda.Event())
                waiting[-1].record()
                if len(waiting) > 2:
                    waiting.popleft().synchronize()
            if progress >= SAFETY_AT and not saved:
                saved = True
                self._export()
            if _now() - printed >= 5:
                self._report(progress, loss, (self.tokens - printed_tokens) / (_now() - printed))
                printed_tokens, printed = self.tokens, _now()
        self._report(1.0, loss, (self.tokens - printed_tokens) / max(_now() - printed, 1e-9))
        self.trained = _now() - begin

    def _first_step(self) -> dict[str, Tensor]:
        """The first step, which compiles. A machine whose compiler fails trains on uncompiled, at a lower speed."""
        try:
            loss = self._train_step(0.0)
        except Exception as error:
            if self.device.type == "cpu":
                raise
            self._write({"compile": f"failed, running uncompiled: {type(error).__name__}: {str(error)[:500]}"})
            self.code = Compiled()
            for w in self.masters.values():
                w.grad = None
            loss = self._train_step(0.0)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._write({"compiled_after_s": round(_now(), 1)})
        return loss

    def _train_step(self, progress: float) -> dict[str, Tensor]:
        rate = schedule(progress)
        row = LONG_ROW if progress >= LONG_FROM else ROW
        batch = self._batch(row)
        tokens = len(batch.tokens)
        layout = layout_of(batch.starts, row, self.way, tokens // ROW * DOCUMENTS_PER_ROW)
        weights = effective(self.masters, progress >= INT4_FROM, self.dtype)
        x_TD, load_ME = forward(NANO, weights, self.bias, batch.tokens, layout, self.code)
        answer = (batch.loss == ANSWER).float()
        # Prompts teach words and shapes early on; late, only answers matter.
        prompt = (batch.loss == PROMPT).float() * max(0.02, 0.2 * rate)
        loss, answer_loss = mean_loss(x_TD, weights["head"], batch.targets, answer + prompt, answer, self.code)
        loss.backward()
        norm = self.optimizer.step(rate)
        balance(self.bias, load_ME, BALANCE_RATE * rate)
        self.step += 1
        self.tokens += tokens
        return {"loss": loss.detach(), "answer_loss": answer_loss, "norm": norm, "balance": entropy_of(load_ME).min()}

    def _batch(self, row: int) -> Unpacked:
        count = max(1, round(TOKENS_PER_STEP * self.scale / row))
        rows = torch.from_numpy(self.pool.take(count, row).astype(np.int32))
        if self.device.type == "cuda":
            rows = rows.pin_memory()
        return unpack(rows.to(self.device, non_blocking=True))

    def _report(self, progress: float, values: dict[str, Tensor], tokens_per_s: float) -> None:
        line = {
            "step": self.step,
            "seconds": round(_now(), 1),
            "tokens": self.tokens,
            **{name: round(float(value), 4) for name, value in values.items()},
            "tokens_per_s": round(tokens_per_s),
            "rate": round(schedule(progress), 4),
            "phase": ("int4" if progress >= INT4_FROM else "bf16") + (" long" if progress >= LONG_FROM else ""),
            "repeated_rows": round(self.pool.repeated, 4),
        }
        if self.device.type == "cuda":
            line["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        self.log.append(line)
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        print(" ".join(f"{key} {value}" for key, value in line.items()), flush=True)
        self.log_file.write(json.dumps(line) + "\n")
        self.log_file.flush()

    def _export(self) -> Path:
        folder = self.out / "kimi-nano"
        export(folder, self.masters, self.bias, NANO)
        for name in TOKENIZER_FILES:
            if (self.tokenizer_folder / name).resolve() != (folder / name).resolve():
                shutil.copyfile(self.tokenizer_folder / name, folder / name)
        return folder

    @torch.no_grad()
    def finish(self) -> None:
        """Exports checkpoint, experts and curve, then measures and writes the card.

        The export comes first, since a measurement can be made again.
        """
        folder = self._export()
        export_experts(self.out / "experts-bf16", self.masters)
        write_curve(self.out / "loss.png", self.log)
        self._write({"exported_after_s": round(_now(), 1)})
        tokenizer = Tokenizer.open(self.tokenizer_folder)
        encoder = Encoder(tokenizer)
        per_kind = max(1, round(PER_KIND * self.scale))
        samples = evaluation("families", per_kind, self.seed)
        evaluated = self._evaluate(encoder, tokenizer, samples)
        (self.out / "evaluation.json").write_text(json.dumps(evaluated, ensure_ascii=False, indent=1) + "\n")
        write_card(folder / "README.md", self.facts | {"trained_s": round(self.trained)}, self.log, evaluated)
        self._write({"ended_after_s": round(_now(), 1)})
        self.log_file.close()

    def _evaluate(self, encoder: Encoder, tokenizer: Tokenizer, samples: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        graded = [(kind, sample) for kind, sample in samples if sample.check]
        result: dict[str, Any] = {}
        for form in ("int4", "bf16"):
            weights: Weights = effective(self.masters, form == "int4", self.dtype)
            model = Model(NANO, weights, self.bias, self.way)
            losses = held_out_loss(model, encoder, samples)
            longest = max(32, round(ANSWER_TOKENS * self.scale))
            given = answers(model, encoder, tokenizer, [sample for _, sample in graded], longest)
            rows = table([kind for kind, _ in graded], [right for _, right in given])
            total = sum(right for right, _ in rows.values()) / max(1, sum(asked for _, asked in rows.values()))
            result[form] = {"losses": losses, "answers": rows, "right": total}
            for kind, value in losses.items():
                right, asked = rows.get(kind, (0, 0))
                share = f"{100 * right / asked:5.1f} % of {asked}" if asked else "not graded"
                print(f"{form}  {kind:20} loss {value:7.4f}   right {share}", flush=True)
            self._write({"form": form, "right": round(total, 4), "seconds": round(_now(), 1)})
            if form == "int4":
                result["examples"] = _examples(graded, given)
        return result


def _examples(graded: Sequence[tuple[str, Any]], given: Sequence[tuple[str, bool]]) -> list[dict[str, Any]]:
    """The first right and the first two wrong answers of each kind, to read."""
    shown: dict[tuple[str, bool], int] = {}
    examples: list[dict[str, Any]] = []
    for (kind, sample), (text, right) in zip(graded, given, strict=True):
        key = (kind, right)
        shown[key] = shown.get(key, 0) + 1
        if shown[key] <= (1 if right else 2):
            asked = sample.messages[-2].get("content") or ""
            examples.append(
                {"kind": kind, "right": right, "asked": asked[-400:], "answer": text[:1200], "check": sample.check}
            )
    return examples


def _now() -> float:
    """Seconds since the process began."""
    return time.perf_counter() - BEGAN


if __name__ == "__main__":
    main()
