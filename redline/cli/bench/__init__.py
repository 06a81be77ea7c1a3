"""`redline bench`: commands that measure steps in this process, and commands that measure a server over HTTP."""

import typer

from redline.cli.bench.accept import AcceptFlags, bench_accept
from redline.cli.bench.agentic import AgenticFlags, bench_agentic
from redline.cli.bench.compare import CompareFlags, bench_compare
from redline.cli.bench.leaderboard import LeaderboardFlags, bench_leaderboard
from redline.cli.bench.options import PeerCommand
from redline.cli.bench.report import ReportFlags, bench_report
from redline.cli.bench.serve import ServeBenchFlags, bench_serve
from redline.cli.bench.steps import (
    DecodeFlags,
    PrefillFlags,
    SpeculateFlags,
    bench_decode,
    bench_prefill,
    bench_speculate,
)
from redline.cli.bench.sweep import SweepFlags, bench_sweep
from redline.cli.flags import verb

app = typer.Typer(
    no_args_is_help=True, help="Measure speed; each figure is reported with the least time that the hardware allows."
)
verb(app, "serve", ServeBenchFlags, cls=PeerCommand)(bench_serve)
verb(app, "compare", CompareFlags, cls=PeerCommand)(bench_compare)
verb(app, "agentic", AgenticFlags, cls=PeerCommand)(bench_agentic)
verb(app, "leaderboard", LeaderboardFlags)(bench_leaderboard)
verb(app, "sweep", SweepFlags, cls=PeerCommand)(bench_sweep)
verb(app, "accept", AcceptFlags, cls=PeerCommand)(bench_accept)
verb(app, "report", ReportFlags)(bench_report)
verb(app, "decode", DecodeFlags)(bench_decode)
verb(app, "prefill", PrefillFlags)(bench_prefill)
verb(app, "speculate", SpeculateFlags)(bench_speculate)
