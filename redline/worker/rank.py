"""A tensor parallel rank above 0: it has its shard of the model, and runs rank 0's commands in order (`worker.ranks`).

Its standard input is like a worker's (`worker.main`): one line of configuration, then a pipe that closes when rank 0
exits. Its standard output has an empty line twice a second, as a heartbeat; if it exits on an error, the last line is
the reason.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch

from redline import clock
from redline.errors import RedlineError
from redline.kernels.cpu import native
from redline.messages.channel import SocketInbox
from redline.messages.media import ImageData
from redline.messages.news import Stop
from redline.messages.ranks import Export, Grow, Scatter
from redline.messages.step import Compile, Forget, Hurry, Place, RecordMore, Step
from redline.model.spec import spec_of
from redline.run.pending import Pending
from redline.run.runner import Runner
from redline.worker.config import RankConfig
from redline.worker.drawn import DigestComparison
from redline.worker.engine import load_model, make_runner, pick_device
from redline.worker.rank_memory import FollowedMemory
from redline.worker.ranks import BEAT_S, device_of, open_group
from redline.worker.turn import one_line

IDLE_S = 0.5  # seconds without a command after which it waits for the last step
_log = logging.getLogger(__name__)


def main() -> int:
    """Run rank 0's commands until a Stop; -> 0. On an error the process exits with code 1, and prints the reason as its
    last line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole process group; rank 0 decides when to stop
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankConfig)
    logging.basicConfig(
        level=os.environ.get("REDLINE_LOG", "WARNING").upper(), format=f"rank {config.rank}: %(levelname)s %(message)s"
    )
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    threading.Thread(target=_beat, name="beats", daemon=True).start()
    try:
        _follow(config)
    except Exception as error:  # the outermost handler: prints one line and exits
        _log.info("the rank ends", exc_info=error)
        print(error if isinstance(error, RedlineError) else one_line(error), flush=True)
        # Nothing is closed: the other ranks would have to wait for it, and on a failed device it may never return.
        os._exit(1)
    return 0


def _follow(config: RankConfig) -> None:
    engine = config.engine
    device = device_of(config.rank, pick_device(engine.device))
    if device.type == "cpu":
        native.share_processors(engine.ranks)
    model = spec_of(config.weights).loader.config(config.weights)
    group = open_group(Path(config.folder), config.rank, engine.ranks, device, model)
    loaded = load_model(config.weights, engine, device, group, aside=config.aside, alone=config.alone)
    inbox = SocketInbox(config.inbox)
    with torch.inference_mode():
        runner = make_runner(Runner, loaded, engine)
        _obey(runner, inbox, DigestComparison(config.rank), FollowedMemory(config.memory, config.rank, runner.kv))
    runner.close()
    inbox.close()
    group.close()


def _obey(runner: Runner, inbox: SocketInbox, comparison: DigestComparison, memory: FollowedMemory) -> None:
    """Runs commands until a Stop. With an asynchronous device, a step is waited for after the next one is launched, as
    on rank 0.

    Raises the exception of a failed step: it may have failed on this rank only, and then all later all-reduces would
    combine different steps. Also raises RankLost if rank 0 has sampled other tokens.
    """

    def wait(pending: Pending | None) -> None:
        if pending is not None:
            comparison.note(pending.wait())

    pending: Pending | None = None
    while True:
        # While a device runs a step, rank 0 sends the next one, which has to be launched; so wait for a command first.
        commands = inbox.drain(wait=True, timeout=None if pending is None else IDLE_S)
        if not commands:
            wait(pending)
            pending = None
        for command in commands:
            match command:
                case Step():
                    before, pending = pending, runner.launch(command)
                    if command.drawn is not None:
                        comparison.hear(command.drawn)
                    wait(before)
                    if not runner.overlaps:
                        wait(pending)
                        pending = None
                case Place(drafts=None):
                    runner.forget_text(command.slot)
                case Place(drafts=drafts):
                    assert drafts is not None, "the previous case handles None"
                    runner.place(command.slot, command.length, drafts)
                case Scatter():
                    # Rank 0 had settled the same steps when it did this: no running step writes to these pages.
                    memory.scatter(command)
                case Export():
                    memory.map(command)
                case Grow():
                    memory.grow(command)
                case Compile():
                    runner.compile(command.number, command.text, memory.has_compiled)
                case ImageData():
                    runner.put_image(command)
                case Forget():
                    runner.forget(command.numbers)
                case RecordMore():
                    runner.record_more()
                case Hurry():
                    runner.hurry()
                case Stop():
                    wait(pending)
                    return
                case _:
                    raise AssertionError(f"unexpected command for a rank: {command}")


def _beat() -> None:
    with contextlib.suppress(BrokenPipeError):  # rank 0 has exited, and this process is about to
        while True:
            os.write(1, b"\n")
            clock.sleep(BEAT_S)


def _leave_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)  # rank 0 has exited


if __name__ == "__main__":
    sys.exit(main())
