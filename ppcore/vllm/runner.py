"""The model runner of one rank of a pipeline, for any platform.

[`PipelineRunner`][ppcore.vllm.runner.PipelineRunner] is mixed in front of nnsight's runner, which
goes in front of the platform's. It builds the tree over this stage's modules and stubs for the
others', learns the schedule from one dummy forward, and drives the protocol at nnsight's own points:
the round opens where the batch is scoped and ends where sampling ends; a request's end is its
collect.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from nnsight.modeling.vllm.batching import VLLMBatcher
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.sequence import IntermediateTensors
from vllm.utils.network_utils import get_ip

from ..runtime import exchange, saved, stubs
from ..runtime.calls import Calls
from ..runtime.controllers import Controllers
from ..runtime.interleaver import PPInterleaver, Recording
from ..runtime.link import Link
from ..runtime.mediator import PPMediator
from ..runtime.ranks import gather
from ..runtime.recording import make_core
from ..runtime.timeline import TimedLink, TimedMediator, Timeline, clock_offset_ns
from ..runtime.transport import connect
from ..runtime.watchdog import Watchdog
from .collectives import shapes_only
from .envoys import StagedFragments, staged_envoys
from .forward_thread import ForwardThread, forward_thread
from .model import CONFIG_KEY, VLLM
from .requests import PPRequests
from .timeline import Part

#: The path of the model in every tree.
ROOT = "model"

#: Tokens and sequences of the dummy forward: extents that no layer of a model is likely to have.
DUMMY_TOKENS, DUMMY_SEQUENCES = 13, 11


class EngineInterleaver(PPInterleaver, VLLMInterleaver):
    """nnsight's engine interleaver on one stage of several."""


class PipelineRunner:
    """Mixed in front of nnsight's model runner on an engine with more than one stage."""

    #: Runs a function where this rank's blocks run; of another thread no greenlet can be resumed.
    on_forward_thread: ForwardThread

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        self.on_forward_thread = forward_thread(self.parallel_config, self.device)
        # Past nnsight's own load_model, which builds the tree this method builds.
        self._load_engine_model(*args, **kwargs)
        settings = self.vllm_config.additional_config.get(CONFIG_KEY, {})
        root = self.get_model()
        whole = exchange.load(
            root, ROOT, (PPMissingLayer,), settings.get("aliases", {}), self._gather
        )
        interleaver: Any = EngineInterleaver(fragments=StagedFragments())
        self.nnsight_model = VLLM(root, interleaver=interleaver, envoys=staged_envoys())
        from vllm.tokenizers import cached_tokenizer_from_config

        self.nnsight_model.tokenizer = cached_tokenizer_from_config(self.model_config)
        interleaver.batcher = VLLMBatcher(None)
        interleaver.defer_exceptions = True
        self._connect(interleaver, root, whole, settings)
        timed = settings.get("timeline")
        self.nnsight_requests = PPRequests(
            interleaver.link,
            TimedMediator if timed else PPMediator,
            Controllers(root),
            self._may_linger,
        )
        objects = self.nnsight_model._remoteable_persistent_objects()
        for path, module in interleaver.calls.paths.items():
            objects.setdefault(f"Module:{path}", module)
        self.nnsight_persistent_objects = objects

    def _load_engine_model(self, *args: Any, **kwargs: Any) -> None:
        self._vllms("load_model")(*args, **kwargs)

    def _vllms(self, method: str) -> Callable[..., Any]:
        """vLLM's own method, which nnsight's stands before."""
        from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner

        return getattr(super(NNsightGPUModelRunner, self), method)

    def _gather(self, value: Any) -> list:
        return gather(value, get_pp_group().cpu_group)

    def _connect(self, interleaver: Any, root: Any, whole: Any, settings: dict) -> None:
        recordings = self._record(interleaver, root)
        exchange.learn(whole, recordings, self._gather)
        pp = get_pp_group()
        column = get_tp_group().rank_in_group
        core = make_core(pp.rank_in_group, whole.schedule, whole.homes, column)
        # All columns' groups are made by every rank, in the same order.
        columns = _columns()
        collective = get_tp_group().world_size > 1
        if collective:
            shapes_only(get_tp_group(), interleaver.beside)
        calls = Calls(interleaver, dict(stubs.modules(root, ROOT)), collective=collective)
        make: Any = Link
        if settings.get("timeline"):
            timeline = Timeline(column, clock_offset_ns(_gather_all))
            make = partial(TimedLink, timeline=timeline)
        link = make(
            core,
            connect(columns, settings.get("transport", "auto"), get_ip()),
            self.device,
            deadline_s=float(settings.get("pull_timeout_s", 300.0)),
            watchdog=Watchdog(float(settings["block_timeout_s"])),
            parameter=calls.value_of,
            describe=calls.describe,
            compute=calls.compute,
            dropped=calls.dropped,
        )
        visits = [visit for recording in recordings for visit in recording.visits]
        interleaver.connect(link, whole.templates, visits, whole.spanning)
        interleaver.calls = calls

    def _record(self, interleaver: Any, root: Any) -> list[Recording]:
        """One dummy forward, with this rank's visits recorded."""
        recordings = [Recording(DUMMY_TOKENS)]
        interleaver.recording = recordings[0]
        interleaver.interleaving = interleaver.busy = True
        try:
            with torch.inference_mode():
                hidden, _ = self._dummy_run(DUMMY_TOKENS, skip_eplb=True)
                if get_pp_group().is_last_rank:
                    interleaver.recording = Recording(DUMMY_TOKENS, DUMMY_SEQUENCES)
                    recordings.append(interleaver.recording)
                    one_each = numpy.ones(DUMMY_SEQUENCES, dtype=numpy.int32)
                    with self.maybe_select_dummy_loras(self.lora_config, one_each):
                        logits = self.model.compute_logits(hidden[:DUMMY_SEQUENCES])
                    interleaver.recording = Recording(DUMMY_TOKENS, DUMMY_SEQUENCES, own_row=True)
                    recordings.append(interleaver.recording)
                    model = self.nnsight_model
                    type(model).logits.provide(model, logits)
                    type(model).samples.provide(
                        model, torch.zeros(DUMMY_SEQUENCES, 1, dtype=torch.int32)
                    )
        finally:
            interleaver.recording = None
            interleaver.interleaving = interleaver.busy = False
        return recordings

    # --- a step -------------------------------------------------------------------------------

    #: Whether the step at hand is vLLM's alone.
    _untraced = False

    def untraced(self, scheduler_output: Any) -> bool:
        """Whether a step has nothing to do with nnsight; then it is left to vLLM."""
        return self.nnsight_requests.untraced(scheduler_output.scheduled_new_reqs)

    def begin(self, scheduler_output: Any) -> None:
        """Do of a step what needs no hidden states, while the stage before computes them.

        New requests' blocks are read, the round opens, and workers go as far as they can: what they pull
        of earlier stages comes while those compute.
        """
        self._untraced = False
        self.on_forward_thread(self._begin, scheduler_output)

    #: The workers of a step that has begun and what they want to look into, until its forward runs.
    _begun: tuple[list, dict] | None = None

    @torch.inference_mode()
    def _begin(self, scheduler_output: Any) -> None:
        saved.watch_saves()
        if not self.nnsight_requests.requests:
            # nnsight does so on the way into a forward that begins with no request.
            saved.forget_all()
        interleaver = self.nnsight_model.interleaver
        interleaver.mediators = []
        with interleaver, self.synchronize_input_prep():  # type: ignore[attr-defined]
            self._update_states(scheduler_output)
            self._begun = interleaver.mediators, dict(interleaver.sourced)

    def _update_states(self, scheduler_output: Any) -> None:
        if self._untraced:
            self._vllms("_update_states")(scheduler_output)
            return
        begun, self._begun = self._begun, None
        if begun is None:
            super()._update_states(scheduler_output)  # type: ignore[misc]
            return
        # Entering the forward has emptied both.
        interleaver = self.nnsight_model.interleaver
        interleaver.mediators, sourced = begun
        interleaver.sourced.update(sourced)
        interleaver.reindex()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # One that has begun has been looked at, and may have let go of its last traced request since.
        self._untraced = self._begun is None and self.untraced(scheduler_output)
        run = self._vllms("execute_model") if self._untraced else self._execute
        return self.on_forward_thread(run, scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        run = self._vllms("sample_tokens") if self._untraced else self._sample_tokens
        return self.on_forward_thread(run, *args, **kwargs)

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        if self._untraced:
            return self._vllms("_sample")(*args, **kwargs)
        return super()._sample(*args, **kwargs)  # type: ignore[misc]

    def _may_linger(self) -> bool:
        """Whether no other request can want this rank before the later stages are through with this step.

        Ray's executor hands on what a step returns, and so only after it.
        """
        return (
            not (get_pp_group().is_last_rank or self.parallel_config.use_ray)
            and self.input_batch.num_reqs == len(self.requests)  # type: ignore[attr-defined]
        )

    def lingers(self) -> bool:
        """Whether blocks wait for later stages in a step that this rank can stay behind."""
        names = self.input_batch.req_ids  # type: ignore[attr-defined]
        return self._may_linger() and bool(self.nnsight_requests.waiting(names))

    def linger(self) -> None:
        """Let blocks go on behind the forward; see `StagedRequests.linger`."""
        self.on_forward_thread(self._linger)

    @torch.inference_mode()
    def _linger(self) -> None:
        self.nnsight_requests.linger(self.input_batch.req_ids)  # type: ignore[attr-defined]

    def _execute(self, *args: Any, **kwargs: Any) -> Any:
        saved.watch_saves()  # on the thread that the workers run on
        output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        if self.parallel_config.use_ray and isinstance(output, IntermediateTensors):
            # Ray's executor samples on the last stage only, where vLLM's others tell every stage.
            self._sample_tokens(None)
        return output

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        self.nnsight_requests.check_abandoned()
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self.nnsight_requests.link.close_round()
        return output

    # --- the end of a request -----------------------------------------------------------------

    def collect_nnsight(
        self,
        request_ids: list[str],
        finished_request_ids: list[str] | None = None,
        outputs: dict | None = None,
    ) -> bytes | None:
        """Wind up the finished requests and return this rank's share of their saves."""
        finished = set(finished_request_ids or [])
        wanted = set(request_ids) | finished
        shipments = self.nnsight_requests.collect(wanted, finished, outputs or {})
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        column, stage = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        timeline = getattr(self.nnsight_requests.link, "timeline", None)
        if column and timeline is None:
            return None
        part = None
        if timeline is not None:
            part = Part(dist.get_rank(), stage, column, timeline.take())
        payload = ({} if column else shipments, part)
        return pickle.dumps(payload, pickle.HIGHEST_PROTOCOL)

    # --- what can be seen from outside --------------------------------------------------------

    def ppcore_status(self) -> dict[str, int]:
        """See `VLLM.pp_status`."""
        requests = self.nnsight_requests
        requests.link.wait_drained()
        return {
            "stage": get_pp_group().rank_in_group,
            "column": get_tp_group().rank_in_group,
            "pid": os.getpid(),
            "requests": len(requests.requests) + len(requests.link.core.requests),
            "workers": len(requests.workers()),
            **requests.link.status(),
        }


def _columns() -> list[list[int]]:
    """The global ranks of every column, in stage order, the same on every rank."""
    gathered = _gather_all(list(get_pp_group().ranks))
    return [list(column) for column in sorted({tuple(found) for found in gathered})]


def _gather_all(value: Any) -> list:
    """Every rank's value, in rank order."""
    return gather(value, get_world_group().cpu_group)
