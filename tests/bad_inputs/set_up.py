"""Settings, environment variables and arguments of `initialize_comms` that cannot be used."""

import os
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import sar
from sar.comm.environment import find_place, first_host


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


CASES = {
    "ConfigError": {
        "There is no Config.comm_buffer_byte": setting("comm_buffer_byte", 5),
        "There is no Config.mode": setting("mode", 2),
        "Config.timeout is 'x'": setting("timeout", "x"),
        "Config.timeout is 0": setting("timeout", 0),
        "Config.comm_buffer_bytes is 0": setting("comm_buffer_bytes", 0),
        "Config.pipeline_depth is True": setting("pipeline_depth", True),
        "Config.disable_sr is 'no'": setting("disable_sr", "no"),
        "Config.wire_dtype_features is 'float16'": setting("wire_dtype_features", "float16"),
        "Config.allocator is 'most'": setting("allocator", "most"),
        "The environment variable RANK is 'one'": environment(RANK="one", WORLD_SIZE="2"),
        "Cannot read the Slurm node list '[1-3'": lambda folder: first_host("[1-3"),
        "This torch has no backend 'carrier pigeon'": start(0, 1, "127.0.0.1", "carrier pigeon"),
        "This torch has no backend 'ccl'": start(0, 1, "127.0.0.1", "ccl"),
        "Rank 2 is not below the world size 2": start(2, 2, "127.0.0.1"),
        "Rank -1 is not below the world size 2": start(-1, 2, "127.0.0.1"),
        "initialize_comms needs master_ip_address": start(0, 2),
        "initialize_comms needs _rank": start(None, 2),
        "initialize_comms needs _rank, _world_size": start_under(RANK="0", MASTER_ADDR="127.0.0.1"),
        "Workers that share a process": start_in_a_thread(SAR_RESIDENT="1", SAR_PARTS="1"),
    },
    "NotInitializedError": {
        "Communication is not set up": lambda folder: sar.rank(),
    },
}
