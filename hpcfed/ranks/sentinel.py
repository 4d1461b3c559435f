"""A process beside each rank that ends ranks which somebody has stopped (SIGSTOP): MPI would wait for them for ever.

It is a child of its rank, so that a rank which is alone on its node has one, too, and in its process group. Who
suspends a job stops whole groups, as mpirun does if it is sent SIGTSTP, or every process of the job, as a queue does:
then no sentinel is awake, and no rank is ended. If one group is stopped alone, sentinels of the node's other ranks
notice.

Open MPI has a detector, too, whose thread, if it is to notice a rank while others compute, makes one start in a hundred
crash.

`hpcfed.ranks.faults` starts this file as a script, without the package and what that imports: a sentinel takes 4 MB.
"""

from __future__ import annotations

import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

# A rank that is found stopped at so many looks in a row is taken for lost.
LOOKS, LOOK_SECONDS = 5, 1.0


class Sentinel:
    """What was seen of ranks, each of which is given by a file descriptor of its process and the number of that."""

    def __init__(self, ranks: Sequence[tuple[int, int]]) -> None:
        self._ranks = ranks
        self._looks: Counter[int] = Counter()
        self._last = time.monotonic()

    def look(self) -> None:
        """Look after the first one: if that is stopped or gone, after the one behind it, too, and so on."""
        before, self._last = self._last, time.monotonic()
        if self._last - before > 2 * LOOK_SECONDS:  # it was stopped, too: let the others wake up
            self._looks.clear()
        for file, number in self._ranks:
            state = _state(file, number)
            if state == "T":
                self._looks[file] += 1
                if self._looks[file] >= LOOKS:
                    with suppress(OSError):  # it may be gone by now
                        signal.pidfd_send_signal(file, signal.SIGKILL)
            else:
                self._looks[file] = 0
                if state:
                    return


def _state(file: int, number: int) -> str:
    """The state of a process as Linux writes it, T if it is stopped; empty if it has ended."""
    try:
        signal.pidfd_send_signal(file, 0)
        with open(f"/proc/{number}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(") ")[2][:1].replace("Z", "")
    except OSError:
        return ""


def main(words: Sequence[str]) -> None:
    """Watch ranks, ``DESCRIPTOR:NUMBER`` each, while the last of them runs."""
    ranks = [(int(file), int(number)) for file, _, number in (word.partition(":") for word in words)]
    own = select.poll()
    own.register(ranks[-1][0], select.POLLIN)
    sentinel = Sentinel(ranks)
    while not own.poll(1000 * LOOK_SECONDS):
        sentinel.look()


if __name__ == "__main__":
    main(sys.argv[1:])
