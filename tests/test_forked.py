"""The fork server continues to serve when processes that use it end in any way."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests import forked


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_an_asker_that_ends_before_its_answer_ends_nobody_else():
    program = [sys.executable, "-c", "print(input())"]
    with forked.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as before:
        cores, nice = [*os.sched_getaffinity(0)], os.getpriority(os.PRIO_PROCESS, 0)
        start = forked.Start(["-c", "pass"], dict(os.environ), os.getcwd(), [0, 1, 2], False, False, cores, nice, [])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker, open(os.devnull, "r+") as nothing:
            asker.connect(forked.nursery())
            socket.send_fds(asker, [json.dumps(start).encode()], [nothing.fileno()] * 3)
        with forked.Popen([sys.executable, "-c", "pass"]) as after:
            assert after._told is not None, "the fork server ended, so this process was started without it"
        assert after.returncode == 0
        assert before.communicate("alive\n") == ("alive\n", None)
    assert before.returncode == 0
