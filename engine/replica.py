"""One worker process: start it up, then lead or follow a replica until all replicas agree to stop.

Rank dp_rank * tp is the leader of its replica: it owns the scheduler, takes requests from the front end and answers
with tokens. The other ranks of the replica execute its plans. Rank 0 also starts the front end and watches it.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from engine.config import EngineConfig, ServerConfig
from engine.core import EngineCore
from engine.errors import EXIT_REFUSED, ConfigError, EngineError, RequestRejected
from engine.executor import Executor
from engine.front_end import FrontEndProcess
from engine.heartbeat import Heartbeat
from engine.messages import (
    AbortRequest,
    AddRequest,
    ExpertLoad,
    Hello,
    Ready,
    RequestFailed,
    ResetPrefixCache,
    Shutdown,
    StepOutput,
    TokenOutput,
    ToReplica,
)
from engine.place import LIFELINE, Place
from engine.preflight import check_all_reduce, check_checkpoint, check_memory, choose_device
from engine.transport import Address, WorkerSocket
from engine.worker import assemble_core, build_worker, create_context, read_model

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
log = logging.getLogger("engine.replica")


class Leader:
    """The loop of a replica's leader. Each turn: take messages, make a step, send what it gave.

    lockstep: with several ranks every one of them steps when any has work; when none has, they agree at a slow tick, which
        a message from the front end cuts short and which keeps collectives from timing out.
    """

    IDLE_TICK_S = 0.1

    def __init__(self, core: EngineCore, executor: Executor, link: WorkerSocket, heartbeat: Heartbeat, lockstep: bool) -> None:
        self._core, self._executor, self._link, self._heartbeat = core, executor, link, heartbeat
        self._lockstep = lockstep
        self._stopping = False
        self._reported_idle = True

    def run(self) -> None:
        """Until all replicas agreed to stop."""
        self._link.send(StepOutput([], self._core.stats()))  # figures from the start
        while True:
            agreement = self._executor.agreement
            idle = not self._core.has_work and not (self._lockstep and (agreement.any_work or agreement.prefill_next))
            self._heartbeat.moved(busy=not idle)
            for message in self._link.receive(self.IDLE_TICK_S if idle and not self._stopping else 0.0):
                self._handle(message)
            if self._stopping:
                self._executor.request_stop()
            if not self._executor.agreement.stop and (self._core.has_work or self._lockstep):
                self._send(self._core.step())
                if (counts := self._executor.take_expert_load()) is not None:
                    self._link.send(ExpertLoad(counts))
            elif not self._stopping:
                self._executor.idle()
            if self._executor.agreement.stop:
                self._send([*self._core.abort_all()])
                return

    def _handle(self, message: ToReplica) -> None:
        match message:
            case AddRequest():
                try:
                    self._core.add(message)
                except RequestRejected as error:
                    self._link.send(RequestFailed(message.request_id, str(error), error.code, error.param))
            case AbortRequest():
                output = self._core.abort(message.request_id, message.reason)
                if output is not None:
                    self._send([output])
            case ResetPrefixCache():
                self._core.reset_prefix_cache()
            case Shutdown():
                self._stopping = True
                self._send([*self._core.abort_all()])

    def _send(self, outputs: list[TokenOutput | RequestFailed]) -> None:
        """One StepOutput for a step's tokens; after the last work one more, so that the front end's load figures settle."""
        tokens: list[TokenOutput] = []
        for output in outputs:
            if isinstance(output, TokenOutput):
                tokens.append(output)
            else:
                self._link.send(output)
        idle = not self._core.has_work
        if tokens or idle != self._reported_idle:
            self._link.send(StepOutput(tokens, self._core.stats()))
        self._reported_idle = idle


def _watch_lifeline() -> None:
    """End this process when the supervisor is gone: its end of the pipe closes even if it was killed."""
    descriptor = os.environ.get(LIFELINE)
    if descriptor is not None:
        os.read(int(descriptor), 1)
        print("the supervisor is gone; ending", file=sys.stderr, flush=True)
        os._exit(1)


def _forward_signals(front_end: FrontEndProcess | None) -> None:
    """SIGTERM and SIGINT mean draining, which is the front end's task: rank 0 passes them on, the others wait for the
    agreed stop. Runs in a thread, since the main thread may be inside a collective."""
    while True:
        signal.sigwait((signal.SIGTERM, signal.SIGINT))
        if front_end is not None:
            front_end.process.send_signal(signal.SIGTERM)


def run_worker(
    config: EngineConfig,
    server: ServerConfig,
    folder: Path,
    place: Place,
    front_end: FrontEndProcess | None,
    began: float,
) -> NoReturn:
    """Be one worker until the engine stops, then end the process. front_end: on rank 0; began: monotonic time at which the
    process did."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"%(levelname)s rank {place.rank} %(name)s: %(message)s")
    # newer releases of torch rename the collectives that older ones have
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    heartbeat: Heartbeat | None = None
    status = 0
    threading.Thread(target=_watch_lifeline, daemon=True).start()
    if front_end is not None:
        try:
            read_model(config, folder, config.parallel.dp, config.parallel.tp)  # what it rules out is said before anybody waits
        except ConfigError as error:
            front_end.kill()
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(EXIT_REFUSED)
    try:
        threading.Thread(target=_forward_signals, args=(front_end,), daemon=True).start()
        store = _store(place)
        if front_end is not None:
            store.set("front_end", front_end.address().dump())
        address = Address.load(store.get("front_end"))
        dp_rank = place.rank // config.parallel.tp
        lost = front_end.kill if front_end is not None else lambda: None
        heartbeat = Heartbeat(address, place.rank, dp_rank, server.heartbeat_s + 1.0, lost)
        heartbeat.report("interpreter", time.monotonic() - began)
        _serve(replace(config, model=str(folder)), place, store, address, heartbeat)
    except Exception as error:  # the worker's outermost loop: whatever it was, the front end hears of it and the tree ends
        status = EXIT_REFUSED if isinstance(error, ConfigError) else 1
        if heartbeat is None or status != EXIT_REFUSED:  # which the front end says, once for all ranks
            log.error("cannot go on: %s", error, exc_info=not isinstance(error, EngineError))
        if heartbeat is not None:
            heartbeat.fail(str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}")
    if status == 0 and heartbeat is not None:
        heartbeat.close()
    if front_end is not None:
        ended = front_end.finish()
        status = status or ended
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # destructors of process groups could wait for ranks that are gone


def _store(place: Place) -> dist.Store:
    """The store through which ranks find each other: a file of ours on one host, else what torchrun offers."""
    if place.run_folder:
        return dist.FileStore(os.path.join(place.run_folder, "rendezvous"), place.world_size)
    if place.world_size == 1:
        return dist.HashStore()
    store, _, _ = next(dist.rendezvous("env://", place.rank, place.world_size))
    return dist.PrefixStore("snapmla", store)


def _serve(config: EngineConfig, place: Place, store: dist.Store, address: Address, heartbeat: Heartbeat) -> None:
    heartbeat.enter("process groups")
    device = choose_device(config.device, place.local_rank, place.local_world_size)
    if place.world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=COLLECTIVE_TIMEOUT)
    parallel = create_context(config, device)
    heartbeat.enter("pre-flight")
    if config.load_format != "dummy":
        size = check_checkpoint(Path(config.model)) if place.local_rank == 0 else 0
        check_memory(device, size, config)
    check_all_reduce(device)
    executor, info = build_worker(config, parallel, heartbeat.enter)
    heartbeat.enter("ready")
    if not parallel.is_leader:
        executor.follow()
        return
    link = WorkerSocket(address)
    link.send(Hello(parallel.rank, parallel.dp_rank, "steps"))
    link.send(
        Ready(
            parallel.dp_rank,
            config.model,
            info.max_model_len,
            info.model_config.vocab_size,
            info.num_blocks,
            info.cache_format,
            config.num_speculative_tokens,
        )
    )
    core = assemble_core(config, executor, info, parallel)
    Leader(core, executor, link, heartbeat, lockstep=parallel.has_peers).run()
    link.close(linger_s=1.0)
