"""A program that reads the log of a process's C++ libraries, and prints one line if JAX aborted that process.

If a process of a run dies, JAX's runtime aborts all others with a long log. No Python code runs in them then, so the
line has to come from another program.
"""

import re
import signal
import sys

AGAIN = "start all processes again with --resume"


def summary(log: str) -> str | None:
    r"""Summarizes a log in one line; None if it contains no fatal error.

    Example:
      >>> summary("W1122 17:01:34.9 12 a.cc:1] Something is odd")
      >>> summary("F1122 17:01:34.9 12 client.h:80] The tasks are unhealthy (stopped sending heartbeats):\n1\n")
      'process 1 was lost: start all processes again with --resume'
    """
    fatal = re.search(r"^(?:F\d{4} [^\]]*\] |terminate called |Fatal Python error: )(.*)", log, re.MULTILINE)
    if fatal is None:
        return None
    lost = re.search(r"unhealthy \(stopped sending heartbeats\):\n((?:\d+\n)+)", log)
    if lost:
        numbers = lost[1].split()
        what = f"process {numbers[0]} was lost" if len(numbers) == 1 else f"processes {', '.join(numbers)} were lost"
        return f"{what}: {AGAIN}"
    if re.search("Failed to send RPC to coordination service|Socket closed|Connection reset|connection attempt", log):
        return f"process 0, the coordinator, was lost: {AGAIN}"
    return f"JAX ended this process ({fatal[1].split('absl::Status: ')[-1][:200]}): {AGAIN}"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if words := summary(sys.stdin.buffer.read().decode(errors="replace")):
        print(f"python -m train_demo: error: {words}", file=sys.stderr, flush=True)
