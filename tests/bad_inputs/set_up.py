"""Settings, environment variables and arguments of `initialize_comms` that cannot be used."""

import os
from concurrent.futures import ThreadPoolExecutor
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


CASES = {
    "a misspelt setting": Case(
        setting("comm_buffer_byte", 5),
        "ConfigError",
        "There is no Config.comm_buffer_byte; did you mean comm_buffer_bytes?",
    ),
    "a setting that is not there": Case(
        setting("mode", 2),
        "ConfigError",
        "There is no Config.mode; expected one of disable_sr, pipeline_depth, max_collective_size, "
        "comm_buffer_bytes, allocator, wire_dtype_features, wire_dtype_gradients, "
        "check_replicas, patch_dgl, timeout.",
    ),
    "a time that is no number": Case(
        setting("timeout", "x"),
        "ConfigError",
        "Config.timeout is 'x'; expected a positive number of seconds.",
    ),
    "no time at all": Case(
        setting("timeout", 0),
        "ConfigError",
        "Config.timeout is 0; expected a positive number of seconds.",
    ),
    "buffers of no size": Case(
        setting("comm_buffer_bytes", 0),
        "ConfigError",
        "Config.comm_buffer_bytes is 0; expected an integer of at least 1.",
    ),
    "a depth that is a truth value": Case(
        setting("pipeline_depth", True),
        "ConfigError",
        "Config.pipeline_depth is True; expected an integer of at least 0.",
    ),
    "a switch that is a word": Case(
        setting("disable_sr", "no"),
        "ConfigError",
        "Config.disable_sr is 'no'; expected True or False.",
    ),
    "another dtype on the wire": Case(
        setting("wire_dtype_features", "float16"),
        "ConfigError",
        "Config.wire_dtype_features is 'float16'; expected None, torch.bfloat16 or torch.float16.",
    ),
    "another allocator": Case(
        setting("allocator", "most"),
        "ConfigError",
        "Config.allocator is 'most'; expected 'auto', 'least', 'kept' or 'system'.",
    ),
    "a rank that is a word": Case(
        environment(RANK="one", WORLD_SIZE="2"),
        "ConfigError",
        "The environment variable RANK is 'one'; expected an integer.",
    ),
    "a list of hosts without names": Case(
        lambda folder: first_host("[1-3"),
        "ConfigError",
        "Cannot read the Slurm node list '[1-3'; pass master_ip_address.",
    ),
    "an unknown backend": Case(
        start(0, 1, "127.0.0.1", "carrier pigeon"),
        "ConfigError",
        "This torch has no backend 'carrier pigeon'; expected one of gloo, nccl, mpi, ccl. For ccl, import its package "
        "first, oneccl_bindings_for_pytorch.",
    ),
    "a backend without its package": Case(
        start(0, 1, "127.0.0.1", "ccl"),
        "ConfigError",
        "This torch has no backend 'ccl'; expected one of gloo, nccl, mpi, ccl. For ccl, import its package first, "
        "oneccl_bindings_for_pytorch.",
    ),
    "a rank beyond the workers": Case(
        start(2, 2, "127.0.0.1"),
        "ConfigError",
        "Rank 2 is not below the world size 2; ranks count from 0.",
    ),
    "a negative rank": Case(
        start(-1, 2, "127.0.0.1"),
        "ConfigError",
        "Rank -1 is not below the world size 2; ranks count from 0.",
    ),
    "no address": Case(
        start(0, 2),
        "ConfigError",
        "initialize_comms needs master_ip_address: not given, and not complete in the environment of torchrun, Slurm"
        " or MPI. Pass them (sar.nfs_ip_init finds the address over a shared file), or use torchrun.",
    ),
    "the number of workers alone": Case(
        start(None, 2),
        "ConfigError",
        "initialize_comms needs _rank, master_ip_address: not given, and not complete in the environment of torchrun, "
        "Slurm or MPI. Pass them (sar.nfs_ip_init finds the address over a shared file), or use torchrun.",
    ),
    "a launcher's environment without the number of workers": Case(
        start_under(RANK="0", MASTER_ADDR="127.0.0.1"),
        "ConfigError",
        "initialize_comms needs _rank, _world_size, master_ip_address: not given, and not complete in the environment "
        "of torchrun, Slurm or MPI. Pass them (sar.nfs_ip_init finds the address over a shared file), or use torchrun.",
    ),
    "virtual workers in a thread of a trainer": Case(
        start_in_a_thread(SAR_RESIDENT="1", SAR_PARTS="1"),
        "ConfigError",
        "Workers that share a process (SAR_RESIDENT) run a script once for each, from its main thread; this is the "
        "thread 'trainer_0', as under Ray Train. Start the script with `sar launch`, torchrun, srun or mpirun.",
    ),
    "a call before set-up": Case(
        lambda folder: sar.rank(),
        "NotInitializedError",
        "Communication is not set up; call sar.initialize_comms() first, on every worker.",
    ),
}
