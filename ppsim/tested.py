"""Planted bugs that no simulated run can show, each with the test that has to fail of it.

What a lazy answers to Python, what torch keeps for a thread, what a block draws, what bytes say: the
simulator's values are terms, and its blocks hold no context open and are the same on every rank. Here a
mutant names a test. It is run in a process of its own, twice: it has to pass as the code is, and to
fail with the bug in it.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

from .hunts import Hunt
from .mutants import Misplaced, Mutant, named, planted

#: The checkout: tests are not installed.
ROOT = Path(__file__).parents[1]
#: A test that takes longer with the bug in it hangs.
LIMIT_S = 90
_RIGHT = "passes without the bug"


def _unit(name: str, target: str, old: str, new: str, file: str, test: str) -> Mutant:
    return Mutant(
        name, f"ppcore.{target}", old, new, test=f"tests/unit/test_{file}.py::test_{test}"
    )


def _rank_of(name: str, target: str, old: str, new: str, test: str) -> Mutant:
    test = f"tests/harness/test_one_rank.py::test_{test}"
    return Mutant(name, f"ppcore.runtime.{target}", old, new, test=test)


def _rank(name: str, method: str, old: str, new: str, test: str) -> Mutant:
    return _rank_of(name, f"requests:StagedRequests.{method}", old, new, test)


def _state(name: str, target: str, old: str, new: str) -> Mutant:
    test = "a_worker_parked_in_a_context_keeps_it_and_the_forward_never_sees_it"
    return _unit(name, f"runtime.threadstate:{target}", old, new, "threadstate", test)


def _held(name: str, target: str, old: str, new: str) -> Mutant:
    test = "what_a_block_holds_open_decides_where_the_operation_is_written"
    return _unit(name, f"runtime.{target}", old, new, "lazy_contexts", test)


def _lazy(name: str, target: str, old: str, new: str, test: str) -> Mutant:
    file = "lazy_alias" if test.startswith("alias:") else "lazy"
    return _unit(name, f"runtime.lazy:{target}", old, new, file, test.removeprefix("alias:"))


TESTED: tuple[Mutant, ...] = (
    # --- values as read
    _lazy("an-edit-of-a-view-stays-there", "_family",
          "if is_lazy(lazy) and family is not None and", "if False and",
          "alias:an_edit_of_a_view_is_seen_by_the_whole"),
    _lazy("derived-of-what-it-becomes", "_detach", "source.value.clone()", "source.value",
          "alias:a_value_written_into_another_before_the_source_is_forced_and_edited"),
    _unit("a-tuple-crosses-as-a-list", "runtime.codec:_encode",
          '(b"(" if isinstance(value, tuple) else b"[")', 'b"["',
          "codec", "a_decoder_layers_value_keeps_its_structure"),
    _unit("a-bool-crosses-as-a-number", "runtime.codec:_encode", 'b"T" if value else b"F"',
          'b"i" + _I64.pack(value)', "codec", "plain_values_keep_their_kind"),
    _unit("keyword-inputs-are-lost", "runtime.interleaver:_build",
          "return {key: _build(item, (*path, key), leaf) for key, item in part.items()}", "return {}",
          "exchange", "the_inputs_of_a_module_keep_what_is_given_by_position_and_by_name"),
    _unit("a-source-location-is-nobodys", "schedule:Schedule._slots", '".source." in location', "False",
          "schedule", "a_source_location_is_as_often_visited_as_its_module"),
    # --- lazies
    _lazy("metadata-costs-a-transfer", "_property", "getattr(node.meta, name)",
          "getattr(force(tensor), name)", "metadata_brings_no_data_and_is_the_real_ones"),
    _lazy("a-real-argument-is-taken-as-it-becomes", "_snapshot", "_real(tensor).clone()",
          "_real(tensor)", "a_real_argument_is_taken_as_it_was_when_the_operation_ran"),
    _lazy("in-asks-for-the-lazy-itself", "LazyTensor.__contains__",
          "resolve(element) in force(self)", "element is self",
          "what_plain_python_needs_is_brought_and_equals_the_real_ones"),
    _lazy("formatting-forgets-its-spec", "LazyTensor.__format__", "format(force(self), spec)",
          "str(force(self))", "what_plain_python_needs_is_brought_and_equals_the_real_ones"),
    _lazy("out-is-not-written", "_mutate", "family.mutations.append(operation)",
          "out is None and family.mutations.append(operation)", "out_may_be_a_lazy"),
    _lazy("in-place-answers-with-another", "_mutate",
          "return target if isinstance(result, torch.Tensor) else result",
          "return LazyTensor.of(target.node)", "an_in_place_operator_answers_with_its_target"),
    _lazy("a-deep-copy-is-itself", "LazyTensor.__deepcopy__", "self.clone()", "self",
          "a_deep_copy_stays_lazy_and_is_memory_of_its_own"),
    _lazy("a-lazy-is-pickled", "LazyTensor.__reduce_ex__", "force(self).__reduce_ex__(protocol)",
          "(LazyTensor.of, (self.node,))", "pickling_brings_the_data_and_leaves_a_plain_tensor"),
    _lazy("recorded-outside-of-its-autocast", "record",
          "torch.is_autocast_enabled(involved[0].node.device.type)", "False",
          "alias:autocast_decides_the_dtype_where_the_operation_is_written"),
    _lazy("a-shape-error-comes-late", "record", "_fail_as_torch_does(function, args, kwargs)",
          "return _run(function, args, kwargs)", "an_error_of_shapes_is_raised_at_the_line_that_makes_it"),
    # --- calls and parameters
    _unit("a-calls-result-comes-and-goes-back", "runtime.calls:_Given.argument",
          "_There(*found)", "tensor",
          "calls", "a_call_of_a_calls_result_sends_neither_there_nor_back"),
    _unit("who-asks-for-a-shape-meets-the-columns", "vllm.collectives:_either",
          "alone if aside() else together", "together", "collectives",
          "who_is_aside_gets_the_shape_and_meets_nobody"),
    _unit("a-module-of-all-stages-is-a-stub", "runtime.stubs:fill",
          "shared.setdefault(first, here[path])", "pass",
          "stubs", "a_module_shared_across_stages_leads_to_this_ranks_own"),
    _unit("a-tied-module-is-two", "runtime.stubs:fill", "shared[aliases.get(path, path)] = module", "pass",
          "stubs", "a_module_at_two_paths_is_one_stub_at_both"),
    # --- behind the forward
    _unit("lingers-before-its-hidden-states-have-arrived", "vllm.worker:TracingWorker.sample_tokens",
          "self._await_sends()", "pass",
          "worker", "a_rank_stays_behind_its_forward_once_what_it_handed_on_has_arrived"),
    _unit("lingers-while-others-wait", "vllm.runner:PipelineRunner._may_linger",
          "self.input_batch.num_reqs == len(self.requests)", "True",
          "worker", "a_rank_stays_behind_its_forward_only_where_nobody_else_can_want_it"),
    _unit("a-step-that-has-begun-is-vllms", "vllm.runner:PipelineRunner.begin",
          "self._untraced = False", "pass",
          "worker", "a_step_without_a_block_is_vllms_alone_and_one_that_has_begun_is_not"),
    _unit("begins-while-it-sends", "vllm.worker:TracingWorker.execute_model",
          "self._await_sends()", "pass",
          "worker", "a_later_stage_begins_a_step_before_it_waits_for_hidden_states"),
    # --- randomness
    _rank_of("every-request-draws-the-same", "mediator:PPMediator.adopt", "str(worker).encode()", 'b""',
             "a_requests_draws_are_its_own_whatever_else_is_in_the_batch"),
    _unit("a-block-draws-from-the-forwards-generator", "runtime.threadstate:Draws.enter",
          "torch.default_generator.manual_seed(self._seed)", "pass",
          "threadstate", "a_workers_draws_do_not_depend_on_what_the_forward_draws"),
    _unit("a-block-draws-from-numpys-generator", "runtime.threadstate:Draws.enter",
          "numpy.random.seed(self._seed % (1 << 32))", "pass",
          "threadstate", "a_workers_draws_do_not_depend_on_what_the_forward_draws"),
    _unit("the-forward-draws-from-a-blocks-generator", "runtime.threadstate:Draws.leave",
          "self._write(self._theirs)", "pass",
          "threadstate", "the_forwards_draws_do_not_depend_on_what_a_worker_draws"),
    _unit("a-draw-in-a-function-is-overlooked", "runtime.threadstate:may_draw",
          "stack.append(value.__code__)", "pass",
          "threadstate", "a_block_that_may_draw_is_told_from_one_that_may_not"),
    # --- saves
    _unit("a-view-brings-the-memory-around-it", "runtime.collect:_own", "return leaf.clone()",
          "return leaf", "collect", "a_small_view_does_not_bring_the_memory_around_it"),
    _unit("a-save-that-cannot-be-pickled-ends-the-rank", "runtime.requests:StagedRequests._ship",
          "taken = Taken({})", "raise",
          "collect", "a_save_that_cannot_be_pickled_is_its_requests_error"),
    _unit("a-view-saved-twice-is-two", "runtime.collect:Taken.shipment", "own[id(leaf)]", "_own(leaf)",
          "collect", "one_tensor_saved_twice_is_one_object_at_home"),
    _unit("a-cache-saved-twice-is-two", "runtime.collect:_Skeleton.persistent_id",
          "if known is value:", "if False:", "collect", "two_caches_keep_apart_and_one_saved_twice_is_one"),
    # --- how requests end
    _rank("a-sequence-brings-the-firsts-saves", "_collect", 'saves[label(index, "saves", name)] = value',
          'saves.setdefault(label(0, "saves", name), value)',
          "every_sequence_of_a_request_brings_its_own_saves"),
    _rank("sequences-in-the-order-of-their-arrival", "_collect", "sorted(found, key=lambda item: item[0])",
          "[(n, one[1]) for n, one in enumerate(found)]",
          "every_sequence_of_a_request_brings_its_own_saves"),
    _rank("an-end-from-outside-leaves-the-block-parked", "finish_dangling", "and mediator.alive",
          "and not mediator.alive",
          "a_request_that_is_ended_from_outside_brings_what_its_block_had"),
    _rank("a-cleared-block-stays-parked", "unregister", "copy.drop()", "pass",
          "a_registered_block_that_is_cleared_while_it_runs_ends_there"),
    _rank_of("a-request-that-is-over-keeps-its-values", "mediator:PPMediator.let_go",
             "self.lcls.clear()", "pass", "a_request_that_is_over_holds_nothing"),
    # --- thread-local state
    _unit("a-block-leaves-its-state-to-the-forward", "runtime.threadstate:Kept.leave",
          "switch(self._inside, self._outside)", "pass",
          "threadstate", "a_worker_parked_in_a_context_keeps_it_and_the_forward_never_sees_it"),
    _unit("a-block-loses-its-state", "runtime.threadstate:Kept.enter",
          "switch(self._outside, self._inside)", "pass",
          "threadstate", "two_workers_parked_in_contexts_keep_apart"),
    _unit("inference-mode-is-left-on", "runtime.threadstate:switch",
          "_set_inference(to.inference)", "pass",
          "threadstate", "a_worker_parked_in_a_context_keeps_it_and_the_forward_never_sees_it"),
    _unit("function-modes-are-not-put-back", "runtime.threadstate:switch",
          "for mode in to.functions:", "for mode in ():",
          "threadstate", "a_worker_parked_in_a_context_keeps_it_and_the_forward_never_sees_it"),
    _state("grad-mode-is-left-on", "switch", "if _C.is_grad_enabled() != to.grad:", "if False:"),
    _state("autocast-is-left-on", "switch", "if here.autocast != to.autocast:", "if False:"),
    _state("dispatch-modes-are-left-on", "switch", "if here.dispatches != to.dispatches:", "if False:"),
    _state("the-default-device-is-left-on", "switch", "if here.device != to.device:", "if False:"),
    _state("saved-tensor-hooks-are-left-on", "switch", "if here.hooks != to.hooks:", "if False:"),
    _state("refused-hooks-stay-refused", "switch", "if here.hooks_refused != to.hooks_refused:",
           "if False:"),
    _unit("transforms-are-left-on", "runtime.threadstate:switch",
          "if here.transforms or to.transforms:", "if False:", "threadstate",
          "a_worker_parked_inside_of_a_transform_keeps_it_and_the_forward_never_sees_it"),
    _unit("a-force-runs-in-what-the-block-holds-open", "runtime.lazy:materialize",
          "threadstate.apart()", "threadstate.contextlib.nullcontext()", "lazy_contexts",
          "a_context_around_a_force_is_none_of_the_recorded_operations"),
    _unit("a-peer-is-answered-in-what-the-block-holds-open", "runtime.link:Link._answer_all", ", apart()", "",
          "calls", "what_a_peer_waits_for_is_made_outside_of_the_blocks_autocast"),
    _held("gradients-pass-a-lazy-by", "lazy:record",
          "or (torch.is_grad_enabled() and _needs_grad((args, kwargs)))", ""),
    _held("a-dispatch-mode-sees-what-is-recorded", "threadstate:decides",
          "_C._len_torch_dispatch_stack()", "False"),
    _held("a-transform-sees-what-is-recorded", "threadstate:decides",
          "or _functorch.peek_interpreter_stack() is not None", ""),
    _held("a-function-mode-misses-an-index", "lazy:LazyTensor.__getitem__",
          "if _len_torch_function_stack():", "if False:"),
    _unit("warnings-go-to-a-parked-frame", "runtime.parking:parking",
          "put(_OUTSIDE)", "pass", "lazy_contexts",
          "a_thread_warns_as_outside_of_calls_while_a_worker_is_parked_inside_of_one"),
    _unit("an-operator-is-parked", "runtime.parking:_check", "if frame.f_code in _OPERATORS:",
          "if False:", "lazy_contexts", "a_call_that_cannot_be_parked_is_refused"),
    _unit("a-backward-is-parked", "runtime.parking:_check",
          "if torch._C._current_graph_task_id() != -1:", "if False:", "lazy_contexts",
          "a_park_inside_of_backward_is_refused"),
    # --- blocks that do something else on each rank, which no program of the simulator does
    Mutant("finished-worker-not-reported", "ppcore.runtime.mediator:PPMediator._resume",
           "self.link.finish(self.worker_id)", "pass",
           test="tests/sim/test_real.py::test_a_rank_that_asks_for_what_another_never_read_is_told"),
    Mutant("own-error-masked-by-its-consequence", "ppcore.runtime.mediator:PPMediator._report",
           "if cause is not None:", "if False:",
           test="tests/sim/test_real.py::test_an_error_that_another_ranks_explains_is_not_the_cause"),
    # --- hostile or broken input
    _rank_of("a-replacement-of-any-shape", "mediator:PPMediator._handle",
             "widened = batcher.widen(value, self.batch_group, given)", "widened = given",
             "a_replacement_of_the_wrong_shape_ends_its_own_request_as_on_one_rank"),
    _unit("divergence-is-not-noticed", "core:Core._answer", "if pull.location != location:",
          "if False:",
          "core_values", "a_block_that_reads_elsewhere_diverged_and_both_locations_are_named"),
    _unit("an-endless-loop-goes-on", "runtime.watchdog:Watchdog._look",
          "_raise_in(self._thread, self._late)", "pass",
          "watchdog", "an_endless_loop_is_ended_at_its_line"),
    _unit("the-watchdog-counts-waits", "runtime.watchdog:Watchdog.waiting",
          "running, self._ends = self._ends is not None, None", "running = self._ends is not None",
          "watchdog", "a_wait_for_another_rank_does_not_count"),
    _unit("the-watchdog-ends-the-runtimes-own-code", "runtime.watchdog:_in_block",
          "if file.startswith(_SERVICE):", "if False:",
          "watchdog", "only_the_blocks_own_code_is_interrupted"),
    _unit("a-replacement-of-any-dtype", "runtime.mediator:_check_dtype",
          "if both and given.dtype != value.dtype", "if False",
          "replacements", "a_replacement_of_another_dtype_is_refused_wherever_it_stands"),
    _unit("a-header-that-lies-is-believed", "wire:sizes",
          "if text_bytes > TEXT_LIMIT or payload_bytes > PAYLOAD_LIMIT:", "if False:",
          "wire", "a_header_that_claims_too_much_is_refused"),
    _unit("bytes-behind-a-payload-are-ignored", "runtime.codec:decode", "if position != len(view):",
          "if False:", "codec", "bytes_behind_the_value_are_refused"),
)  # fmt: skip


def tried(mutant: Mutant) -> Hunt:
    """Run the mutant's test with the bug and without it.

    Raises:
        Misplaced: there is no such test here, or it fails as the code is.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "ppsim.tested", mutant.name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, said = 0, str(late.stdout)
    if _RIGHT not in said:
        raise Misplaced(f"{mutant.name}: {mutant.test} does not pass as the code is")
    return Hunt(mutant.name, not status, 0, time.monotonic() - began, "test" if not status else "")


def main(name: str) -> int:
    """Run a mutant's test, in this process; 0 where the bug is found."""
    pytest = importlib.import_module(
        "pytest"
    )  # only here: the simulator needs the standard library
    mutant = named(name)
    chosen = ["-q", "-x", "-p", "no:cacheprovider", mutant.test]
    if pytest.main(chosen) != pytest.ExitCode.OK:
        return 2
    print(_RIGHT, flush=True)
    with planted(mutant):
        return int(pytest.main(chosen) != pytest.ExitCode.TESTS_FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
