"""Break sar on purpose, one central line at a time, and check that a fast test notices: `make mutants`.

Each mutant is one line of a copy of the tree, and the test that must fail on it. A mutant whose line is no longer
there, or whose test does not run, is an error: correct the list below when the line moves.

    python tools/mutate.py                 # all; about ten minutes
    python tools/mutate.py halo softmax    # those whose name has one of these words
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
LIMIT = 240
"""Seconds that a test may take on one mutant, compiling kernels included."""
PASSED, FAILED = 0, 1
"""What pytest exits with; another status means that the tests did not run."""


class Mutant(NamedTuple):
    """One line to break: the first place in `file` where `old` stands becomes `new`, and `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    Mutant(
        "products of one worker beside features of another",
        "sar/adapters/dgl/patched_layers.py",
        "(message._replace(lhs=PRODUCTS) for message in",
        "(message for message in",
        "tests/parity/test_layers.py::test_a_hook_on_one_worker_only",
    ),
    Mutant(
        "hooks of a product that comes first",
        "sar/adapters/dgl/patched_layers.py",
        "is_exactly(layer.fc_self, nn.Linear) and is_exactly(layer.fc_neigh, nn.Linear)",
        "is_exactly(layer.fc_self, nn.Linear)",
        "tests/parity/test_layers.py::test_a_product_to_as_many_features",
    ),
    Mutant(
        "sign of a difference's gradient",
        "sar/kernels/cpu/kernels.py",
        'code, sign = loops.COPY, sign if wrt == "rhs" else 1',
        "code, sign = loops.COPY, 1",
        "tests/kernels/test_gradients.py::test_of_every_operation",
    ),
    Mutant(
        "first edge of a node left out",
        "sar/kernels/cpu/aggregate_loops.py",
        "range(u64(csr.indptr[group]), u64(csr.indptr[group + ONE])):",
        "range(u64(csr.indptr[group]) + ONE, u64(csr.indptr[group + ONE])):",
        "tests/kernels/test_aggregate.py::test_sum",
    ),
    Mutant(
        "rows without edges left as memory was",
        "sar/kernels/cpu/aggregate_loops.py",
        "clear(out.values, cleared * layout.out_width, own * layout.out_width)",
        "clear(out.values, own * layout.out_width, own * layout.out_width)",
        "tests/kernels/test_aggregate.py::test_rows_without_edges_become_zero",
    ),
    Mutant(
        "last column of a row left out",
        "sar/kernels/cpu/rows.py",
        "width, length - c, out",
        "width, length - c - u64(1), out",
        "tests/kernels/test_rows.py::test_rows_are_added_one_after_the_other",
    ),
    Mutant(
        "lost edge ID offset",
        "sar/kernels/cpu/csr_view.py",
        "np.uint64(block.edge_offset)",
        "np.uint64(0)",
        "tests/core/test_used_graphs.py::test_a_change_of_a_used_graph",
    ),
    Mutant(
        "lost edge ID offset, Python messages",
        "sar/core/passing/reducers.py",
        "return column[block.edge_offset : block.edge_offset + block.num_edges]",
        "return column[: block.num_edges]",
        "tests/core/test_pruned_backward.py::test_gradients",
    ),
    Mutant(
        "softmax without the running maximum",
        "sar/kernels/cpu/attention_loops.py",
        "total[own + h] *= shrinks[t + h]",
        "total[own + h] *= 1",
        "tests/kernels/test_attention.py::test_result_and_gradients",
    ),
    Mutant(
        "softmax that keeps what a greater score makes 0",
        "sar/kernels/cpu/attention_loops.py",
        "if peak[own + h] >= lowest and shrinks[t + h] != 1:",
        "if total[own + h] != 0 and shrinks[t + h] != 1:",
        "tests/kernels/test_attention.py::test_scores_of_any_size_in_any_order",
    ),
    Mutant(
        "softmax's gradient without its mean",
        "sar/kernels/torch.py",
        "(share * grad_dot - stats[edges.dst, GRAD_DOT])",
        "(share * grad_dot)",
        "tests/kernels/test_attention.py::test_result_and_gradients",
    ),
    Mutant(
        "wrong halo offset",
        "sar/comm/tiles.py",
        "[halo.reader][halo.begin : halo.end]",
        "[halo.reader][: halo.end - halo.begin]",
        "tests/core/test_checkpointing.py::test_many_tiles",
    ),
    Mutant(
        "rows that are not waited for",
        "sar/comm/exchange.py",
        "                    self.group.wait_for(inbound.wait, self.signature, peer=inbound.peer)\n"
        "                rows",
        "                    pass\n                rows",
        "tests/core/test_traffic.py::test_rows_and_gradients_are_waited_for",
    ),
    Mutant(
        "gradients that are not waited for",
        "sar/comm/exchange.py",
        "                    self.group.wait_for(inbound.wait, self.signature, peer=inbound.peer)\n"
        "                self._rows.add",
        "                    pass\n                self._rows.add",
        "tests/core/test_traffic.py::test_rows_and_gradients_are_waited_for",
    ),
    Mutant(
        "gradients that are not added",
        "sar/comm/tiles.py",
        "self._returns.add(index.to(total.device), to_device(place, total.device).to(total.dtype), total)",
        "pass",
        "tests/core/test_traffic.py::test_rows_and_gradients_are_waited_for",
    ),
    Mutant(
        "changed rows that are not laid out again",
        "sar/outofcore/process_rows.py",
        "is not None and written[0] == version:",
        "is not None:",
        "tests/virtual/test_memory.py::test_rows_are_laid_out_again_if_they_have_changed",
    ),
    Mutant(
        "kept rows whose buffer is used again",
        "sar/comm/exchange.py",
        "None if self.keep else inbound",
        "inbound",
        "tests/core/test_checkpointing.py::test_many_tiles",
    ),
    Mutant(
        "workers that make different calls",
        "sar/comm/group.py",
        "if set(digests) != {digest}:",
        "if not digests:",
        "tests/core/test_agreement.py::test_another_width_dtype_operation_or_setting",
    ),
    Mutant(
        "an error that the others do not hear of",
        "sar/comm/group.py",
        "            group.abort(error)",
        "            pass",
        "tests/core/test_failures.py::test_an_error_inside_local_scope_reaches_everybody",
    ),
    Mutant(
        "one worker's gradient only",
        "sar/core/collective.py",
        "call.needed |= flags",
        "call.needed = call.flags()",
        "tests/core/test_gradient_rules.py::test_a_gradient_wanted_on_one_rank_only",
    ),
    Mutant(
        "degrees without clamp",
        "sar/core/relation.py",
        "(self.out_degrees if out else self.in_degrees).clamp(min=1)",
        "(self.out_degrees if out else self.in_degrees)",
        "tests/parity/test_values.py::test_nothing_reduces_to_zero",
    ),
    Mutant(
        "a mean's gradient without the degree",
        "sar/core/passing/reducers.py",
        "return grad / self.relation.degrees(grad.dtype, grad.dim())",
        "return grad",
        "tests/parity/test_messages.py::test_messages",
    ),
    Mutant(
        "the greatest gradient for their sum",
        "sar/comm/collectives.py",
        "group.all_reduce(travelling, dist.ReduceOp.SUM, call)",
        "group.all_reduce(travelling, dist.ReduceOp.MAX, call)",
        "tests/comm/test_parameters.py::test_gather_grads_sums",
    ),
    Mutant(
        "running variance of the sample",
        "sar/nn/statistics.py",
        "(var * count / (count - 1))",
        "(var * 1)",
        "tests/nn/test_batch_norm.py::test_batch_norm",
    ),
    Mutant(
        "one of several gradients of an embedding",
        "sar/nn/rows.py",
        "sums.index_add_(0, place, values)",
        "sums.index_copy_(0, place, values)",
        "tests/nn/test_embedding.py::test_lookups_of_any_nodes",
    ),
    Mutant(
        "Adam's bias correction of the first step",
        "sar/nn/sparse_optimizers.py",
        '(1 - second ** state["step"])',
        "(1 - second)",
        "tests/nn/test_embedding.py::test_full_graph_training_beside_shared_parameters",
    ),
    Mutant(
        "a permutation that is not put back",
        "sar/sampling/loops.py",
        "order[u64(picked[to + i])] = picked[to + i]",
        "order[i] = i",
        "tests/sampling/test_draws.py::test_draws_are_the_reference_s",
    ),
    Mutant(
        "seeds off by one",
        "sar/sampling/seeds.py",
        "self._order(len(self._seeds), number)[: sum(sizes)]",
        "self._order(len(self._seeds), number + 1)[1 : sum(sizes) + 1]",
        "tests/sampling/test_seed_batches.py::test_one_worker_cuts_as_torchs_loader",
    ),
    Mutant(
        "a directory in its place before its files are on the disk",
        "sar/partition/new_directory.py",
        "sync(path)",
        "pass",
        "tests/partition/test_integrity.py::test_everything_is_on_the_disk_before_the_directory_has_its_name",
    ),
    Mutant(
        "edges whose ends are not checked",
        "sar/partition/graph_source.py",
        "if (found := find_outside(src, dst, self.num_nodes)) is not None:",
        "if (found := None) is not None:",
        "tests/partition/ingest/test_edges.py::test_copies_are_checked_again_for_a_graph_of_fewer_nodes",
    ),
    Mutant(
        "a skipped fsync",
        "sar/host/durable.py",
        "os.fsync(descriptor)",
        "pass",
        "tests/data/test_durable.py::test_bytes_are_on_the_disk_before_the_name_is_and_the_name_before_the_call_returns",
    ),
    Mutant(
        "a sum without the last bytes",
        "sar/data/checksums.py",
        "buffer[:count]",
        "buffer[: count - 1]",
        "tests/data/test_durable.py::test_the_sum_of_a_file",
    ),
    Mutant(
        "a file that is not compared with its sum",
        "sar/data/checksums.py",
        "file_sum(file) != crc",
        "False",
        "tests/partition/test_integrity.py::test_a_page_of_zeros_is_found",
    ),
    Mutant(
        "nodes numbered with a gap",
        "sar/partition/write/write_job.py",
        "firsts = sizes.cumsum() - sizes",
        "firsts = sizes.cumsum() - sizes - 1",
        "tests/partition/test_partition_graph.py::test_parts_are_those_of_dgl",
    ),
    Mutant(
        "workers that walk their steps in different orders",
        "sar/comm/tiles.py",
        "steps.append(Step(next(places), receive, send))",
        "steps.insert(self.rank % 2 * len(steps), Step(next(places), receive, send))",
        "tests/comm/test_order.py::test_rows_and_gradients_arrive_in_any_order_of_messages",
    ),
    Mutant(
        "messages of NCCL that are not waited for",
        "sar/comm/process_transport.py",
        "both = self._nccl._end_coalescing().wait",
        "both = self._nccl._end_coalescing().__str__",
        "tests/core/test_host_waits.py::test_where_the_host_waits",
    ),
    Mutant(
        "messages of two workers first, NCCL",
        "sar/comm/process_transport.py",
        "self._nccl.allreduce([met], AllreduceOptions()).wait(limit)",
        "pass",
        "tests/core/test_host_waits.py::test_where_the_host_waits",
    ),
    Mutant(
        "NCCL that outlives an error",
        "sar/comm/process_transport.py",
        "self._nccl.abort()",
        "pass",
        "tests/comm/test_transports.py::test_nccl_is_made_anew_and_aborted_in_each_generation",
    ),
    Mutant(
        "degrees that their reader can change",
        "sar/core/graph/queries.py",
        "        return degrees.clone()",
        "        return degrees",
        "tests/core/graph/test_answers.py::test_answers_are_the_callers",
    ),
    Mutant(
        "another message function in the backward",
        "sar/core/passing/python_messages.py",
        "if not fingerprint.equals(self.fingerprint):",
        "if False:",
        "tests/core/test_second_run.py::test_other_messages_than_in_the_forward_are_an_error",
    ),
]


def mutate(tree: Path, mutant: Mutant) -> None:
    """Change the line in a copy of the tree."""
    file = tree / mutant.file
    text = file.read_text()
    if mutant.old not in text:
        raise SystemExit(f"'{mutant.name}': {mutant.file} no longer has the text\n    {mutant.old}")
    file.write_text(text.replace(mutant.old, mutant.new, 1))


def copied_tree(folder: Path) -> Path:
    """What tests need, with the code that Numba has compiled, which is found by the files' times."""
    for name in ("sar", "tests", "examples", "docs"):
        shutil.copytree(REPOSITORY / name, folder / name)
    shutil.copy2(REPOSITORY / "pyproject.toml", folder)
    return folder


def run_tests(tree: Path, *tests: str, limit: float = LIMIT) -> int | None:
    """What pytest exits with on this tree; None where it took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def judge(tree: Path, mutant: Mutant) -> str:
    """How the test took the mutant: "noticed", or what went wrong."""
    mutate(tree, mutant)
    try:
        status = run_tests(tree, mutant.test)
    finally:
        shutil.copy2(REPOSITORY / mutant.file, tree / mutant.file)
    if status == FAILED:
        return "noticed"
    if status is None:
        return f"NOT JUDGED: more than {LIMIT} s"
    return "SURVIVED" if status == PASSED else f"NOT JUDGED: pytest's exit status {status}"


def main(words: list[str]) -> int:
    """Judge the mutants whose name has one of the words, or all; 1 where one was not noticed."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="sar-mutants-") as folder:
        tree = copied_tree(Path(folder))
        tests = sorted({mutant.test for mutant in chosen})
        if run_tests(tree, *tests, limit=LIMIT * 4) != PASSED:
            print(f"These tests do not pass as things are: {' '.join(tests)}")
            return 1
        bad = 0
        for mutant in chosen:
            start = time.monotonic()
            verdict = judge(tree, mutant)
            bad += verdict != "noticed"
            print(f"{mutant.name:48} {mutant.file:40} {time.monotonic() - start:5.0f} s  {verdict}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants were noticed.")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
