"""A Python whose program runs in a fork of the server: ``python -I -S client.py SOCKET [options] program...``.

It needs nothing but the standard library and starts in a few hundredths of a second. Its streams, folder, environment
and signals are the program's, and it ends as the program does.
"""

import array
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


KNOWN = ("-c", "-m", "-u")  # of Python's own options


def main(address, arguments):
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in KNOWN):
        os.execv(sys.executable, [sys.executable, *arguments])
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    order = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(order).encode()
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(text).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(text)
    answers = server.makefile("r")
    program = int(answers.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(program, number))
    for stream in (0, 1, 2):  # who reads what the program writes waits for the program alone
        os.close(stream)
    status = int(answers.readline() or -signal.SIGKILL)
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
