"""`redline audit`: reads texts, shows the progress, prints the tables, and lists every excess over a limit."""

import msgspec
from rich.console import Console
from rich.table import Table

from redline.bench.quality.audit_page import audit_page, subtitle
from redline.bench.quality.texts import read_texts
from redline.bench.record import provenance
from redline.cli.console import save_result, say
from redline.cli.quantize import AuditConfig
from redline.disk import check_output
from redline.disk import save as save_file
from redline.model.k2.checkpoint import Checkpoint
from redline.progress import Working
from redline.quant.audit import Audit, Bounds, audit
from redline.quant.texts import chosen, halves
from redline.worker.engine import pick_device

NAMED = 20  # maximum number of excesses printed


def run(config: AuditConfig, console: Console) -> int:
    """Returns the exit code: 0, or 1 if a limit is exceeded. Raises ConfigError and CheckpointError."""
    for path in filter(None, (config.save, config.html)):
        check_output(path)
    a, b = Checkpoint.open(config.a), Checkpoint.open(config.b)
    device = pick_device(config.device)
    _, held_out = halves(read_texts(config.a, config.text)) if config.tokens else ([], [])
    texts = chosen(held_out, config.tokens, a.config.vocab_size) if config.tokens else []
    bounds = Bounds(
        weight=config.most_weight_error,
        output=config.most_output_error,
        kl=config.most_kl,
        agreement=config.least_agreement,
    )
    with Working("audit") as working:
        found = audit(a, b, texts, bounds, device, lambda what, share: working.show(share, 1.0, what=what))
    origin = provenance("torch")
    if config.html is not None:
        where = [(key, str(value)) for key, value in origin.items()]
        save_file(config.html, audit_page(found, config.a.name, config.b.name, where).encode())
    if config.save is not None:
        save_result(config.save, {**origin, **msgspec.structs.asdict(found)}, console)
    _print(found, console)
    if config.html is not None:
        say(console, f"written to {config.html}", "dim")
    return int(bool(found.excess))


def _print(found: Audit, console: Console) -> None:
    say(console, subtitle(found))
    by_projection: dict[str, list[float]] = {}
    for row in found.weights:
        by_projection.setdefault(row.name.split(".")[-2], []).append(row.error)
    table = Table("projection", "weights", "error", "worst")
    for name, errors in sorted(by_projection.items()):
        mean = (sum(error**2 for error in errors) / len(errors)) ** 0.5
        table.add_row(name, f"{len(errors):,}", f"{mean:.4f}", f"{max(errors):.4f}")
    if by_projection:
        console.print(table)
    if found.experts:
        mean = (sum(row.output**2 for row in found.experts) / len(found.experts)) ** 0.5
        worst = max(found.experts, key=lambda row: row.output)
        say(
            console,
            f"outputs of {len(found.experts):,} experts: error {mean:.4f}; worst {worst.output:.4f}, "
            f"layers.{worst.layer}.mlp.experts.{worst.expert} ({worst.tokens:,} tokens)",
        )
    if found.domains:
        table = Table("domain", "tokens", "KL, nats", "99 %", "same likeliest, %", "perplexity A", "B")
        for row in found.domains:
            cells = f"{row.kl:.5f}", f"{row.kl_99:.4f}", f"{100 * row.agreement:.2f}"
            perplexities = f"{row.perplexity_a:.4f}", f"{row.perplexity_b:.4f}"
            table.add_row(row.domain, f"{row.tokens:,}", *cells, *perplexities)
        console.print(table)
    b = found.bounds
    most = f"weight {b.weight:g}, output {b.output:g}, KL {b.kl:g}, agreement {b.agreement:g}"
    if not found.excess:
        say(console, f"everything is within its bounds: {most}", "green")
    for one in found.excess[:NAMED]:
        may = "at least" if one.bound == "agreement" else "at most"
        say(console, f"{one.bound} of {one.of}: {one.value:.4f}, {may} {one.most:g}", "red")
    if len(found.excess) > NAMED:
        say(console, f"and {len(found.excess) - NAMED:,} more", "red")
