"""The one translation of k3train's settings into megatron-core's ``TransformerConfig``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import init_method_normal

from k3train.config import schema
from k3train.config.part import read_part
from k3train.plan.recompute import RecomputePlan, recompute_plan

if TYPE_CHECKING:
    from k3train.parallel.layout import Layout


@dataclass
class K3Config(TransformerConfig):
    """megatron-core's config with the K3 settings beside it.

    k3train's own modules read ``config.k3``; megatron-core's linears, dispatchers, schedules and
    ``DistributedDataParallel`` read the fields they know. The two are never set independently.
    """

    k3: schema.Model = field(default_factory=schema.Model)
    """The model as the user configured it."""
    recompute: RecomputePlan = field(default_factory=RecomputePlan)
    """What the backward pass computes again."""

    cuda_graphs: bool = False
    """Whether parts of a layer may be recorded as CUDA graphs and replayed."""

    def __post_init__(self) -> None:
        """Refuse, with ValueError, what megatron-core would run and get wrong without a word."""
        super().__post_init__()
        if self.virtual_pipeline_model_parallel_size is not None and self.batch_p2p_comm:
            raise ValueError(
                "batch_p2p_comm with virtual pipeline chunks mixes up messages between two pipeline ranks, "
                "each of which is the other's both neighbours: set overlap_p2p_comm in its place"
            )
        if not self.calculate_per_token_loss:
            raise ValueError(
                "without calculate_per_token_loss each micro-batch and context-parallel share weighs the "
                "same, however few loss tokens it has: set calculate_per_token_loss"
            )


def fp8_recipe(config: Any) -> schema.Fp8:
    """What dense projections round their operands by; none in a megatron-core model that is not ours.

    megatron-core's own ``fp8`` fields stay unset: they are about its Transformer Engine layers.
    """
    return config.k3.fp8 if isinstance(config, K3Config) else schema.Fp8.none


def part_settings[Part](given: Part | None, config: TransformerConfig, name: str) -> Part:
    """The settings of ``model.NAME``: those ``given``, else those that ``config.k3`` carries.

    Raises ValueError when they cannot be and when there are none.
    """
    if given is not None:
        return read_part(given, f"model.{name}")
    if (model := getattr(config, "k3", None)) is None:
        raise ValueError(
            f"settings is missing, and a plain TransformerConfig has none of K3's: pass "
            f"settings=k3train.config.schema.{name.capitalize()}(...)"
        )
    return getattr(model, name)


def params_dtype(model: schema.Model) -> torch.dtype:
    """Dtype of matrices and activations; small fp32 parameters are listed in the modules that own them."""
    return torch.bfloat16 if model.precision is schema.Precision.bf16 else torch.float32


def make_config(model: schema.Model, parallel: schema.Parallel, layout: Layout) -> K3Config:
    """Translate a model and its layout for megatron-core, on the GPU and on the CPU alike.

    ``layout`` fixes every degree; of ``parallel`` only recomputation and the dispatcher are read. The result
    has the model's true hidden size; ``payload.schedule_config`` makes the one that pipeline schedules need.
    """
    init = init_method_normal(model.init_std)
    dtype = params_dtype(model)
    moe = model.moe
    return K3Config(
        k3=model,
        recompute=recompute_plan(parallel),
        # with pipeline ranks several micro-batches are under way at once
        cuda_graphs=parallel.cuda_graphs and layout.pp == 1,
        # shape
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_heads,
        ffn_hidden_size=model.dense_ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # experts: what megatron-core's token dispatchers read
        num_moe_experts=moe.num_experts,
        moe_router_topk=moe.top_k,
        moe_ffn_hidden_size=moe.expert_ffn_size,
        moe_token_dispatcher_type=parallel.dispatcher.value,
        moe_router_load_balancing_type="none",
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_aux_loss_coeff=0.0,
        # numbers
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        init_method=init,
        output_layer_init_method=init,
        embedding_init_method=init,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        # layout
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # With virtual chunks on two pipeline ranks, batched point-to-point silently pairs the wrong messages,
        # because each rank is the other's both neighbours; separate overlapped calls do not.
        batch_p2p_comm=layout.vp == 1,
        overlap_p2p_comm=layout.vp > 1,
        deallocate_pipeline_outputs=True,
        hetereogenous_dist_checkpoint=True,
        transformer_impl="local",
    )
