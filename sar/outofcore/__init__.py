"""Workers that share a process and take turns, so that p workers need the memory of about one.

[Note: workers of one process]
Each of W processes runs V workers: threads that each run the user's script as one of p = W x V workers, with global
ranks w * V + v. One of them runs at a time. It keeps the turn until a distributed call. There it waits for the other V
- 1 to arrive at the same call, and they get the turn one after the other. The order is the same in all processes: the
v-th workers of all of them run at the same time, so that their messages are an ordinary exchange among W processes.

    process 0   worker 0 ~~~| worker 1 ~~~| worker 2 ~~~| worker 2 ~~~| worker 0 ~~~| worker 1 ~~~|
                            call A        call A        A: all are there; on to call B ...

The rest of sar sees an ordinary `Group` over another transport (`transport.py`). An agreement is one meeting of the V
workers; the last to arrive runs one all-gather of the W processes for all of them. Rows of the same process are read
in place or from letters ([Note: rows of the same process]). A worker that gives the turn away leaves memory ([Note:
leaving memory]).
State of the process that each worker needs for itself, such as `Config`, is swapped (`state.py`).
"""
