"""The check of a step with a fault in it: every survivor raises soon, and names the rank and what it was doing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.faults import IN_USER_CODE, OF_PROCESSES, STUCK, STUCK_SECONDS, WAIT_SECONDS, Fault
from tests.process.pool import Pool

__all__ = ["SAID", "SECONDS", "assert_all_name_the_culprit"]

SECONDS = {  # the bars, of an idle machine; one that is stuck learns it when it comes back
    **dict.fromkeys(IN_USER_CODE, 2.0), "kill": 3.0, "leave": 3.0, "stop": 10.0, "stuck": STUCK_SECONDS + 2.0,
}  # fmt: skip
SAID = {**IN_USER_CODE, **OF_PROCESSES, **{kind: text.format(WAIT_SECONDS) for kind, text in STUCK.items()}}  # by kind
CLOSE_SECONDS = 5.0
SLACK = 4.0  # times as long on a busy one


def assert_all_name_the_culprit(
    processes: Pool, fault: Fault, stages: int, schedule: str, meet: Callable[..., Any], *arguments: Any
) -> None:
    """Run ``meet(*arguments, fault, stages, schedule)`` on all ranks; it returns a :data:`tests.process.failing.Ending`."""
    lost = fault.kind in OF_PROCESSES
    wanted = SAID[fault.kind]
    if lost:
        answers = processes.survivors(stages, fault.victim, meet, *arguments, fault, stages, schedule)
    else:
        answers = dict(enumerate(processes.run(stages, meet, *arguments, fault, stages, schedule, spoils=True)))
    for rank, (error, text, seconds, again, at_once, closing) in answers.items():
        if rank == fault.victim and fault.kind in ("interrupted", "exit"):
            assert error == ("KeyboardInterrupt" if fault.kind == "interrupted" else "SystemExit"), "it stays what it is"
        else:
            assert error == "PipelineError", f"rank {rank}: {error}: {text}"
            assert text.startswith(f"rank {fault.victim} failed: "), f"rank {rank}: {text}"
            assert wanted in text, text
            # process 0 hosts the store: what it was doing is not known when it is gone
            assert re.search(r"stage \d \((down|up)\), micro-batch \d, action \d[FBIW]\d", text) or (lost and fault.victim == 0), (
                text
            )
        assert again == "PipelineError"
        assert seconds < SLACK * SECONDS[fault.kind]
        assert at_once < SLACK * 1.0
        assert closing < SLACK * CLOSE_SECONDS
