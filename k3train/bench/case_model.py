"""The whole model, forward and backward without an optimizer: k3train and NeMo Automodel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3train.bench.items import model_experiment
from k3train.bench.place import Cannot, Case, Place, alone
from k3train.bench.work import Shape
from k3train.config import schema
from k3train.config.compose import compose
from k3train.data.batch import IGNORE, MicroBatch
from k3train.data.device import to_device
from k3train.plan.counts import kda_layers, mla_layers


def case(by: str, s: Shape, place: Place) -> Case:
    """Documents of random ids over the whole vocabulary; new weights, whose router decides: natural."""
    model = compose([f"experiment={model_experiment(s)}"]).model
    if place.compiling:
        model = replace(model, num_layers=4, mla_layers=[3])
    batch = random_documents(s["tokens"], s["documents"], model.vocab_size)
    made = (_ours if by == "k3train" else _automodel)(model, batch, place)
    made.routing = "natural"
    return made


def random_documents(n: int, documents: int, vocabulary: int) -> MicroBatch:
    """Documents of ``n`` random ids each, one after another in one micro-batch."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (documents, n + 2)).astype(np.int32)
    labels, labels_mtp = tokens[:, 1:-1].copy(), tokens[:, 2:].copy()
    labels[:, -1] = labels_mtp[:, -2:] = IGNORE
    return MicroBatch(
        tokens=tokens[:, :-2].ravel(),
        labels=labels.ravel(),
        labels_mtp=labels_mtp.ravel(),
        cu_seqlens=np.arange(0, documents * n + 1, n, dtype=np.int32),
        valid=np.ones(documents * n, bool),
        documents=[],
    )


def _ours(model: schema.Model, batch: MicroBatch, place: Place) -> Case:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from k3train.model.build import build_model

    one = alone(model, place.device)
    (chunk,) = build_model(model, one.config, one.layout, one.groups, place.device)
    data = to_device(batch, device=place.device)
    extra = {"labels_mtp": data.labels_mtp} if model.mtp.num_layers else {}

    def loss(net: Any) -> Tensor:
        return net(data.tokens, data.packing, labels=data.labels, **extra).sum()

    def both() -> None:
        chunk.zero_grad(set_to_none=True)
        loss(chunk).backward()

    def with_fp32_gradients() -> Callable[[], None]:
        chunk.zero_grad(set_to_none=True)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        wrapped = DistributedDataParallel(one.config, settings, chunk, pg_collection=one.groups.pg)

        def run() -> None:
            with wrapped.no_sync():
                loss(wrapped).backward()

        return run

    return Case(
        forward=lambda: loss(chunk),
        both=both,
        trained={"forward + backward into fp32 gradients": with_fp32_gradients},
        note=f"gradients in the parameters' dtype; recomputation {schema.Parallel().recompute.value}",
    )


def _automodel(model: schema.Model, batch: MicroBatch, place: Place) -> Case:
    place.needs_gpu("its package")
    from nemo_automodel.components.models.common import (  # pyright: ignore[reportMissingImports]
        BackendConfig,
    )
    from nemo_automodel.components.models.kimi_k3.model import (  # pyright: ignore[reportMissingImports]
        KimiK3ForCausalLM,
    )

    if len(batch.cu_seqlens) > 2:
        raise Cannot("only one document: its packing masks attention densely")
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch",
        experts="torch_mm",
        dispatcher="torch",
        rope_fusion=False,
        compile_situ=True,
        compile_norm=True,
        compile_router_weight=True,
    )
    with place.device:
        peer = KimiK3ForCausalLM(_automodel_config(model), backend=backend)
    peer.initialize_weights(place.device, dtype=place.dtype)
    peer.train()
    ids, labels = (
        torch.from_numpy(x.astype(np.int64))[None].to(place.device) for x in (batch.tokens, batch.labels)
    )

    def loss() -> Tensor:
        logits = peer(ids).logits
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    def both() -> None:
        peer.zero_grad(set_to_none=True)
        loss().backward()

    note = "fused KDA, Triton SiTU (fast math) and mix, compiled norms; loss from fp32 logits"
    return Case(forward=loss, both=both, note=note)


def _automodel_config(m: schema.Model) -> Any:
    from nemo_automodel.components.models.kimi_k3.config import (  # pyright: ignore[reportMissingImports]
        KimiK3TextConfig,
    )

    return KimiK3TextConfig(
        vocab_size=m.vocab_size,
        hidden_size=m.hidden_size,
        intermediate_size=m.dense_ffn_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_heads,
        moe_intermediate_size=m.moe.expert_ffn_size,
        num_experts=m.moe.num_experts,
        num_experts_per_token=m.moe.top_k,
        num_shared_experts=m.moe.num_shared_experts,
        first_k_dense_replace=m.num_dense_layers,
        routed_expert_hidden_size=m.moe.latent_size,
        q_lora_rank=m.mla.q_lora_rank,
        kv_lora_rank=m.mla.kv_lora_rank,
        qk_nope_head_dim=m.mla.qk_head_dim,
        qk_rope_head_dim=m.mla.qk_shared_head_dim,
        v_head_dim=m.mla.v_head_dim,
        attn_res_block_size=m.attn_res.block_layers,
        kda_chunk_impl="fused",
        situ_backend="triton_fast_math",
        attn_res_triton=True,
        linear_attn_config={
            "head_dim": m.kda.head_dim,
            "num_heads": m.num_heads,
            "short_conv_kernel_size": m.kda.conv_kernel,
            "kda_layers": [layer + 1 for layer in kda_layers(m)],
            "full_attn_layers": [layer + 1 for layer in mla_layers(m)],
            "use_full_rank_gate": True,
            "gate_lower_bound": m.kda.gate_lower_bound,
        },
    )
