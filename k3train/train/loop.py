"""The training loop: stages, steps, evaluations and checkpoints of one run."""

from __future__ import annotations

import math
from enum import Enum
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from k3train.checkpoint.agree import on_first_rank
from k3train.checkpoint.finite import NotFinite
from k3train.checkpoint.folder import clear_leftovers, newest_good, set_aside
from k3train.checkpoint.load import load_checkpoint, read_train_state
from k3train.config.schema import Run
from k3train.curriculum.stages import context_ahead, stage_at, stage_table, total_tokens
from k3train.faults import point
from k3train.optim.build import reload_master_weights
from k3train.train.evaluate import evaluate, rehearse_ahead
from k3train.train.guards import Action
from k3train.train.left_out import read_left_out, trained_what_is_left_out
from k3train.train.progress import Progress, is_due
from k3train.train.report import Report
from k3train.train.resume import bookmark_of, check_text, go_on
from k3train.train.saving import Saver, checkpoints
from k3train.train.setup import StageSetup, build_stage, close_stage
from k3train.train.signals import EXIT_DONE, EXIT_STOPPED, StopRequest, any_wants_stop, seconds_left
from k3train.train.step import rehearse, train_step
from k3train.train.stragglers import Pace
from k3train.train.verdict import TrainingError, Verdict
from k3train.train.watchdog import Watchdog


def train(run: Run, device: torch.device) -> int:
    """Train ``run`` from its newest checkpoint, or from the start, to its end. Every rank must call this.

    Returns EXIT_DONE, or EXIT_STOPPED when the run was asked to stop and has saved.
    """
    table = stage_table(run)
    stop = StopRequest(
        Path(run.dir), seconds_left=seconds_left(run), margin_seconds=run.cluster.stop_margin_seconds
    )
    point("setup.start")
    watch = Watchdog(run)
    watch.enter("verification", 0)
    latest, progress = find_progress(run)
    report = Report(run, table)
    saver = Saver(run, report, watch)
    watch.tell = report.hung
    try:
        report.run_started(run, progress, latest)
        while progress.tokens < total_tokens(table):
            watch.enter("setup", progress.step)
            plan = stage_at(table, progress.tokens)
            setup = build_stage(run, table, plan, progress, device, bookmark_of(latest))
            point("setup.built")
            with stop.pause():
                restore(setup, progress, latest)
            point("setup.restored")
            rehearse(setup, progress)
            rehearse_ahead(setup)
            report.stage_started(setup, progress, latest)
            if progress.step == 0:  # where the first stage's held-out loss falls from
                watch.enter("evaluation", 0)
                measure(setup, progress, report, stop, [plan.stage.context_tokens])
                report.meter.start()
            latest, ended = train_stage(setup, progress, report, saver, stop, watch)
            close_stage(setup)
            if ended is Ended.sent_back:
                watch.enter("verification", progress.step)
                latest, progress = find_progress(run)
            elif ended is Ended.asked and progress.tokens < total_tokens(table):
                report.stopped(progress, stop.reason)
                stop.clear_file()
                return EXIT_STOPPED
        report.finished(progress)
    except NotFinite:
        saver.finish()  # of a state before, which was good
        raise
    except Exception as error:
        error.add_note(f"after step {progress.step}")
        raise
    finally:
        saver.close()
        watch.close()
        report.close()
        stop.restore()
    return EXIT_DONE


class Ended(Enum):
    """Why a stage's training is over."""

    through = "through"
    """All its tokens are trained."""
    asked = "asked"
    """Some rank was asked to stop."""
    sent_back = "sent back"
    """A spike sends the run back to its last checkpoint."""


def train_stage(
    setup: StageSetup, progress: Progress, report: Report, saver: Saver, stop: StopRequest, watch: Watchdog
) -> tuple[Path | None, Ended]:
    """Train until the stage has ended, one way or another; returns the checkpoint that was then saved.

    Raises TrainingError when a step is too bad to go on. Every rank must call this.
    """
    run, plan = setup.run, setup.plan
    pace = Pace(every_steps=run.guards.straggler_every_steps, ratio=run.guards.straggler_ratio)
    while True:
        watch.enter("step", progress.step + 1)
        pace.begin(progress.step + 1, setup.device)
        point("data.next")
        with report.meter.data_wait():
            batches = next(setup.batches)
        result = train_step(setup, progress, batches, wants_stop=stop.poll())
        result.slowest = pace.end(setup)
        report.step(setup, progress, result)
        saver.poll()
        match result.verdict:
            case Verdict(action=Action.stop) as verdict:
                saver.finish()
                raise TrainingError(verdict)
            case Verdict(action=Action.rollback):
                with stop.pause():  # what follows is no step
                    saver.finish()
                return None, Ended.sent_back
        ended, stopping = progress.tokens == plan.end_tokens, result.stop
        evaluates = ended or is_due(progress.step, run.curriculum.eval_every_steps)
        path, ahead = None, context_ahead(run, setup.table, plan)
        with report.meter.pause():
            if evaluates:
                watch.enter("evaluation", progress.step)
                stopping |= measure(setup, progress, report, stop, [plan.stage.context_tokens])
            if ended or stopping or is_due(progress.step, run.checkpoint.every_steps):
                how = saver.save_now if ended or stopping else saver.save
                with stop.pause():
                    path = how(setup, progress, milestone=ended)
                if ended:
                    report.stage_ended(setup, progress)
                # Asked to stop while saving: what was just saved is enough.
                stopping = stopping or (path is not None and any_wants_stop(stop, setup.device))
            # Behind the save: should the longer context fail, nothing that is trained is lost.
            if evaluates and ahead is not None and not stopping:
                watch.enter("evaluation", progress.step)
                stopping = measure(setup, progress, report, stop, [ahead])
                if stopping and path is None:
                    path = saver.save_now(setup, progress, milestone=ended)
            if ended or stopping:
                return path, Ended.asked if stopping else Ended.through


def measure(
    setup: StageSetup, progress: Progress, report: Report, stop: StopRequest, contexts: list[int]
) -> bool:
    """Evaluate and report; whether the run was asked to stop meanwhile. Every rank must call this.

    Raises NotFinite when a held-out loss is NaN or infinite.
    """
    with stop.pause("pass"):
        losses, stopping = evaluate(setup, contexts, stop)
    report.evaluation(setup, progress, losses, complete=not stopping)
    for each in losses:
        if not math.isfinite(each.loss):
            raise NotFinite(
                f"after step {progress.step} the held-out loss on {each.heldout} is {each.loss}: the run "
                "ends here. It can go on from its last checkpoint; if the same comes again, lower "
                "optim.learning_rate"
            )
    return stopping


def find_progress(run: Run) -> tuple[Path | None, Progress]:
    """The run's newest good checkpoint and where it stands; (None, start) for a run that has none.

    After a rollback it is the newest that has trained none of the steps left out. Raises CheckpointError when
    the run has checkpoints and none can be used, and ConfigError when they are not this run's. Every rank
    must call this.
    """
    folder = checkpoints(run)
    if dist.get_rank() == 0:
        clear_leftovers(folder)
    dist.barrier()
    left_out = read_left_out(Path(run.dir))
    unfit = partial(trained_what_is_left_out, left_out)
    latest = newest_good(folder, unfit)
    progress = Progress()
    if latest is not None:
        progress = go_on(run, read_train_state(latest), latest)
        on_first_rank(lambda: set_aside(folder, unfit, after=progress.step))
    # Written after the checkpoint, when a step was left out since.
    progress.guards.left_out = left_out or progress.guards.left_out
    return latest, progress


def restore(setup: StageSetup, progress: Progress, latest: Path | None) -> None:
    """Load ``latest``, saved under whatever layout, into this stage's model and optimizer.

    Without one, a run with ``checkpoint.load_from`` takes that checkpoint's weights and nothing else.
    """
    start_from = setup.run.checkpoint.load_from
    state = None
    if latest is not None:
        # newest_good, or the save at the end of the stage before, has just read back every byte.
        state = load_checkpoint(
            latest, chunks=setup.chunks, optimizer=setup.optimizer, groups=setup.groups, verified=True
        )
    elif start_from is not None:
        load_checkpoint(Path(start_from), chunks=setup.chunks, optimizer=None, groups=setup.groups)
        reload_master_weights(setup.optimizer)
    check_text(setup, progress, state)
