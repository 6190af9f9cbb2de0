"""One stage's parallelism: the run's, with what the stage overrides."""

from __future__ import annotations

from dataclasses import fields, replace

from k3train.config.schema import Model, Parallel, Run, Stage, StageParallel


def stage_parallel(parallel: Parallel, override: StageParallel) -> Parallel:
    """Degrees that hold in one stage.

    A stage that changes pp or vp without giving a pipeline_split gets none: the run's was made for other
    chunks.
    """
    changes = {
        field.name: getattr(override, field.name)
        for field in fields(override)
        if getattr(override, field.name) is not None
    }
    reshaped = any(
        changes.get(name, getattr(parallel, name)) != getattr(parallel, name) for name in ("pp", "vp")
    )
    if reshaped and "pipeline_split" not in changes:
        changes["pipeline_split"] = None
    return replace(parallel, **changes)


def stage_model(model: Model, stage: Stage) -> Model:
    """The model as one stage trains it: of the same shape, with the stage's weight of the MTP loss."""
    if stage.mtp_loss_weight is None:
        return model
    return replace(model, mtp=replace(model.mtp, loss_weight=stage.mtp_loss_weight))


def world_size(run: Run) -> int:
    """Processes of the run."""
    return run.cluster.nodes * run.cluster.ranks_per_node


def even_split(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Decoder layers of each chunk in pipeline order: at most one apart, the shorter chunks last.

    The last chunk also computes the output head, which costs about as much as a layer.
    """
    base, longer = divmod(num_layers, chunks)
    return tuple(base + (position < longer) for position in range(chunks))
