"""Settings, environment variables and arguments of `initialize_comms` that cannot be used."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import sar
from sar.comm.environment import find_place, first_host
from tests.bad_inputs import Case


def setting(name, value):
    """Set `Config`."""
    return lambda folder: setattr(sar.Config, name, value)


def environment(**variables):
    """Look for a launcher's variables."""
    return lambda folder: find_place(variables)


def start_under(**variables):
    """Start without arguments, with these variables of a launcher."""

    def call(folder):
        with mock.patch.dict(os.environ, variables):
            sar.initialize_comms()

    return call


def start_in_a_thread(**variables):
    """Start as the function of a trainer does, with these variables, and a folder for what leaves memory."""

    def call(folder):
        with (
            mock.patch.dict(os.environ, variables | {"SAR_SPILL_DIR": str(folder)}),
            ThreadPoolExecutor(1, "trainer") as trainer,
        ):
            trainer.submit(sar.initialize_comms).result(20)

    return call


def start(*args):
    return lambda folder: sar.initialize_comms(*args)


case = partial(Case, error="ConfigError")

CASES = {
    "a misspelt setting": case(setting("comm_buffer_byte", 5), "There is no Config.comm_buffer_byte"),
    "a setting that is not there": case(setting("mode", 2), "There is no Config.mode"),
    "a time that is no number": case(setting("timeout", "x"), "Config.timeout is 'x'"),
    "no time at all": case(setting("timeout", 0), "Config.timeout is 0"),
    "buffers of no size": case(setting("comm_buffer_bytes", 0), "Config.comm_buffer_bytes is 0"),
    "a depth that is a truth value": case(setting("pipeline_depth", True), "Config.pipeline_depth is True"),
    "a switch that is a word": case(setting("disable_sr", "no"), "Config.disable_sr is 'no'"),
    "another dtype on the wire": case(
        setting("wire_dtype_features", "float16"), "Config.wire_dtype_features is 'float16'"
    ),
    "another allocator": case(setting("allocator", "most"), "Config.allocator is 'most'"),
    "a rank that is a word": case(environment(RANK="one", WORLD_SIZE="2"), "The environment variable RANK is 'one'"),
    "a list of hosts without names": case(lambda folder: first_host("[1-3"), "Cannot read the Slurm node list '[1-3'"),
    "an unknown backend": case(
        start(0, 1, "127.0.0.1", "carrier pigeon"), "This torch has no backend 'carrier pigeon'"
    ),
    "a backend without its package": case(start(0, 1, "127.0.0.1", "ccl"), "This torch has no backend 'ccl'"),
    "a rank beyond the workers": case(start(2, 2, "127.0.0.1"), "Rank 2 is not below the world size 2"),
    "a negative rank": case(start(-1, 2, "127.0.0.1"), "Rank -1 is not below the world size 2"),
    "no address": case(start(0, 2), "initialize_comms needs master_ip_address"),
    "the number of workers alone": case(start(None, 2), "initialize_comms needs _rank"),
    "a launcher's environment without the number of workers": case(
        start_under(RANK="0", MASTER_ADDR="127.0.0.1"), "initialize_comms needs _rank, _world_size"
    ),
    "virtual workers in a thread of a trainer": case(
        start_in_a_thread(SAR_RESIDENT="1", SAR_PARTS="1"), "Workers that share a process"
    ),
    "a call before set-up": case(lambda folder: sar.rank(), "Communication is not set up", error="NotInitializedError"),
}
