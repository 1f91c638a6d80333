"""Virtual workers: threads of one process that take turns, so that p workers need the memory of about one.

[Note: virtual workers]
A process runs V virtual workers: threads that each run the user's script as if they were one of p = W x V workers, with
global ranks w * V + v. Exactly one has the turn, and it keeps it until a distributed call: there it waits for the other
V - 1 to arrive at the same call, and one after the other gets the turn. The order is fixed and the same in all
processes, so that the v-th workers of all processes run at the same time and what they send each other is an ordinary
exchange among W processes.

    process 0   worker 0 ~~~| worker 1 ~~~| worker 2 ~~~| worker 2 ~~~| worker 0 ~~~| worker 1 ~~~|
                            call A        call A        A: all are there; on to call B ...

The rest of sar sees an ordinary group (`group.py`): agreement is one meeting of the V workers and one all-gather of the
W processes, made by the last worker to arrive. A sweep (`exchange.py`) reads the rows of the process's own workers
where they have published them, and receives those of other processes.

Who gives the turn away leaves memory (`residency.py`, [Note: leaving memory]): large tensors are written to a file, and
mapped from there (`spill.py`, [Note: memory of the file]).

What belongs to a worker but lives in the process, such as generators of random numbers, `Config` and counters, is
swapped with the turn (`turns.py`). `workers.py` starts the threads and watches them.
"""
