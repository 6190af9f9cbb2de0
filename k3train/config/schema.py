"""Every setting of a run: its type, its unit and a default that is safe on a laptop.

Values live in ``configs/``; this file says what may be set and what it means. A key path in YAML, on the
command line and in Python is the same: ``run.optim.learning_rate`` is ``optim.learning_rate``.

Every class is ``kw_only`` and ``slots``: without slots a structured Hydra config silently accepts keys that
do not exist. Enum members are named as the user types them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from k3train.config.schema_guards import Guards as Guards
from k3train.config.schema_guards import OnNonFinite as OnNonFinite
from k3train.config.schema_guards import OnSpike as OnSpike
from k3train.config.schema_muon import Muon as Muon
from k3train.config.schema_muon import MuonPrecision as MuonPrecision
from k3train.config.schema_muon import NewtonSchulz as NewtonSchulz
from k3train.config.schema_muon import QkClip as QkClip
from k3train.config.schema_router import AuxLoss as AuxLoss
from k3train.config.schema_router import BalanceAlarms as BalanceAlarms
from k3train.config.schema_router import BalanceMonitor as BalanceMonitor
from k3train.config.schema_router import BalanceScope as BalanceScope
from k3train.config.schema_router import Quantile as Quantile
from k3train.config.schema_router import QuantileExact as QuantileExact
from k3train.config.schema_router import Router as Router
from k3train.config.schema_router import RouterInput as RouterInput
from k3train.config.schema_router import RouterRule as RouterRule
from k3train.config.schema_router import SignBias as SignBias


class Device(Enum):
    """Where ranks compute."""

    auto = "auto"
    """CUDA when a GPU is visible, else the CPU."""
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """Parameter and activation dtype. Master weights, main gradients and moments are always fp32."""

    bf16 = "bf16"
    fp32 = "fp32"


class Fp8(Enum):
    """How operands of matrix products are rounded to FP8, by megatron-core's names (extra: te)."""

    none = "none"
    tensorwise = "tensorwise"
    """One scale for each matrix, from its present values; gradients in E5M2, the rest in E4M3."""
    blockwise = "blockwise"
    """One scale for 128 channels of a token or 128x128 weights, all in E4M3 (DeepSeek-V3). Hopper."""
    mxfp8 = "mxfp8"
    """One power of two for 32 values, all in E4M3. Blackwell."""


# --------------------------------------------------------------------------------------------------- model


@dataclass(kw_only=True, slots=True)
class Kda:
    """Kimi Delta Attention (k3 report eq. 1-6): linear attention with a per-channel bounded decay."""

    head_dim: int = 32
    """Key and value channels per head."""
    conv_kernel: int = 4
    """Taps of the causal depth-wise convolutions on q, k and v."""
    decay_rank: int = 32
    """Rank of the low-rank projection that makes the decay."""
    gate_lower_bound: float = -5.0
    """g_min: log-decay per token lies in (g_min, 0). Refused outside [-5, 0): kernels hold e^(16 * 5)."""
    dt_min: float = 0.001
    """Smallest initial step of the decay bias (inverse softplus of a log-uniform draw)."""
    dt_max: float = 0.1
    """Largest initial step of the decay bias."""
    norm_eps: float = 1e-5
    """Epsilon of the per-head output RMSNorm."""


@dataclass(kw_only=True, slots=True)
class Mla:
    """Gated multi-head latent attention without positions (NoPE)."""

    q_lora_rank: int = 64
    """Width of the compressed query."""
    kv_lora_rank: int = 32
    """Width of the compressed key/value latent."""
    qk_head_dim: int = 32
    """Query/key channels per head that come from the latent."""
    qk_shared_head_dim: int = 16
    """Key channels that all heads share (the slice that carried RoPE in DeepSeek-V3; not rotated here)."""
    v_head_dim: int = 32
    """Value channels per head."""
    norm_eps: float = 1e-6
    """Epsilon of the two latent RMSNorms."""


@dataclass(kw_only=True, slots=True)
class AttnRes:
    """Block attention residuals: a softmax over depth replaces the residual sum."""

    block_layers: int = 2
    """Decoder layers in one block (K3: 12)."""


@dataclass(kw_only=True, slots=True)
class Moe:
    """Stable LatentMoE: experts work in a narrow latent, router and shared experts at full width."""

    num_experts: int = 16
    top_k: int = 4
    """Experts per token."""
    expert_ffn_size: int = 64
    """Inner width of one routed expert."""
    latent_size: int = 64
    """Width in which routed experts work."""
    num_shared_experts: int = 1
    """Shared experts, stored as one fused feed-forward of num_shared_experts * shared_ffn_size."""
    shared_ffn_size: int = 64
    """Inner width of one shared expert."""
    latent_norm: bool = True
    """RMSNorm on the summed expert outputs before the up-projection."""
    router: Router = field(default_factory=Router)


@dataclass(kw_only=True, slots=True)
class Situ:
    """SiTU-GLU caps: gate_cap*tanh(g/gate_cap)*sigmoid(g) times up_cap*tanh(u/up_cap)."""

    gate_cap: float = 4.0
    up_cap: float = 25.0


@dataclass(kw_only=True, slots=True)
class Mtp:
    """Multi-token prediction."""

    num_layers: int = 0
    """0 (off) or 1: one extra layer that predicts the token after next."""
    loss_weight: float = 0.1
    """Weight of the MTP loss in the training loss."""


@dataclass(kw_only=True, slots=True)
class Model:
    """Shape of the model."""

    num_layers: int = 5
    hidden_size: int = 128
    num_heads: int = 4
    """Heads of KDA and of MLA."""
    vocab_size: int = 4096
    """Rows of the embedding; must not be less than the tokenizer's size."""
    num_dense_layers: int = 1
    """Leading layers with a dense feed-forward in place of the MoE."""
    dense_ffn_size: int = 256
    mla_every: int = 4
    """Layer l (from 0) is MLA when (l + 1) % mla_every == 0, and the last layer always is (K3's rule)."""
    mla_layers: list[int] | None = None
    """Explicit MLA layers, from 0; replaces the rule above."""
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of the normal initialisation of every matrix."""
    precision: Precision = Precision.fp32
    fp8: Fp8 = Fp8.none
    """In the dense projections of attention, feed-forwards and latents; all else keeps ``precision``."""
    kda: Kda = field(default_factory=Kda)
    mla: Mla = field(default_factory=Mla)
    attn_res: AttnRes = field(default_factory=AttnRes)
    moe: Moe = field(default_factory=Moe)
    situ: Situ = field(default_factory=Situ)
    mtp: Mtp = field(default_factory=Mtp)


# ------------------------------------------------------------------------------------------------ parallel


class Recompute(Enum):
    """What the backward pass computes again instead of keeping."""

    none = "none"
    selective = "selective"
    """Nothing is kept that is cheap to compute: depth mixes, norms, convolutions, gates, SiTU-GLU, MLA's
    up-projections and what they exchange."""
    full = "full"
    """Only inputs are kept: a decoder layer's if both its sublayers are full, else a sublayer's."""


class Dispatcher(Enum):
    """How tokens travel to experts."""

    alltoall = "alltoall"
    allgather = "allgather"


@dataclass(kw_only=True, slots=True)
class Parallel:
    """Degrees of parallelism; the data-parallel degree is what is left of the world size."""

    tp: int = 1
    """Tensor parallel (sequence parallel follows it)."""
    pp: int = 1
    """Pipeline parallel."""
    vp: int = 1
    """Virtual pipeline chunks per pipeline rank."""
    cp: int = 1
    """Context parallel: contiguous shards of the packed buffer."""
    ep: int = 1
    """Expert parallel, folded over dp x cp."""
    etp: int = 1
    """Tensor parallel inside experts."""
    pipeline_split: list[int] | None = None
    """Decoder layers of each chunk in pipeline order (pp*vp numbers); None splits by cost at the context."""
    recompute: Recompute = Recompute.none
    """Of every kind of sublayer that the next four leave at None."""
    recompute_kda: Recompute | None = None
    recompute_mla: Recompute | None = None
    """MLA in decoder layers and in the MTP layer."""
    recompute_moe: Recompute | None = None
    """Experts, routed and shared, in decoder layers and in the MTP layer."""
    recompute_dense: Recompute | None = None
    """Feed-forwards of the leading dense layers."""
    recompute_offload: bool = False
    """Keep the inputs of what is fully recomputed in pinned memory of the host."""
    dispatcher: Dispatcher = Dispatcher.alltoall
    cuda_graphs: bool = True
    """On a GPU, replay layers, but for attention itself, as CUDA graphs where they send and recompute
    nothing; not with pp."""


@dataclass(kw_only=True, slots=True)
class StageParallel:
    """Overrides of ``parallel`` in one stage; None keeps the run's value."""

    tp: int | None = None
    pp: int | None = None
    vp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    pipeline_split: list[int] | None = None
    recompute: Recompute | None = None
    recompute_kda: Recompute | None = None
    recompute_mla: Recompute | None = None
    recompute_moe: Recompute | None = None
    recompute_dense: Recompute | None = None
    recompute_offload: bool | None = None
    dispatcher: Dispatcher | None = None
    cuda_graphs: bool | None = None


# --------------------------------------------------------------------------------------------------- optim


class Optimizer(Enum):
    """Update rule of matrices; everything else always takes AdamW."""

    adamw = "adamw"
    muon = "muon"
    """Momentum orthogonalised by Newton-Schulz, per head for q, k and v (K3)."""


class Schedule(Enum):
    """Learning rate over the run's tokens."""

    cosine = "cosine"
    wsd = "wsd"
    """Warm-up, stable, then linear decay over the last decay_fraction."""
    constant = "constant"


class Offload(Enum):
    """Where the optimizer's state lies and its update is computed."""

    none = "none"
    """On the rank's device."""
    cpu = "cpu"
    """On the host, with DeepSpeed's CPU Adam (extra: deepspeed): AdamW only."""


@dataclass(kw_only=True, slots=True)
class Optim:
    """Optimizer and learning-rate schedule."""

    optimizer: Optimizer = Optimizer.adamw
    offload: Offload = Offload.none
    learning_rate: float = 2e-3
    """Peak learning rate."""
    min_learning_rate: float = 2e-4
    """Where the schedule ends."""
    schedule: Schedule = Schedule.cosine
    warmup_fraction: float = 0.01
    """Share of the run's tokens in the linear warm-up."""
    decay_fraction: float = 0.1
    """Share of the run's tokens in the final decay of wsd."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices; never to norms, biases, gates' A and dt, convolutions or AttnRes."""
    clip_grad_norm: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    muon: Muon = field(default_factory=Muon)
    qk_clip: QkClip = field(default_factory=QkClip)


# ---------------------------------------------------------------------------------------------------- data


@dataclass(kw_only=True, slots=True)
class Source:
    """One corpus folder, or a part of it."""

    path: str
    """Folder with tokens.bin, tokens.idx and manifest.json; relative paths start at the working directory."""
    min_document_tokens: int = 0
    """Only documents at least this long."""
    max_epochs: float = 1.0
    """How often a document may be seen; a plan that needs more is refused."""


@dataclass(kw_only=True, slots=True)
class Data:
    """Where text comes from and how it is packed."""

    sources: dict[str, Source] = field(default_factory=dict[str, Source])
    """Named sources, which the stages' mix refers to."""
    heldout: dict[str, str] = field(default_factory=dict[str, str])
    """Named corpus folders for evaluation."""
    tokenizer: str | None = None
    """tokenizer.json that made the corpora; null compares none."""
    pack_window_tokens: int = 4_194_304
    """Documents are packed best-fit within windows of this many tokens (at least 64 sequences)."""
    prefetch_steps: int = 2
    """Global batches assembled ahead of training."""
    allow_unsealed: bool = False
    """Accept a .bin/.idx pair without a manifest (no hashes to check)."""


# ---------------------------------------------------------------------------------------------- curriculum


@dataclass(kw_only=True, slots=True)
class StageLearningRate:
    """Learning-rate changes at one stage."""

    peak: float | None = None
    """Peak of this stage; None keeps optim.learning_rate."""
    warmup_tokens: int = 0
    """Linear re-warm-up at the start of the stage."""


@dataclass(kw_only=True, slots=True)
class Stage:
    """One stretch of training at one context length."""

    context_tokens: int
    """Length of one packed sequence."""
    tokens: int
    """Budget of the stage: padding and all, a multiple of batch_tokens."""
    batch_tokens: int
    """Global batch of one optimizer step, a multiple of context_tokens."""
    micro_batch_sequences: int = 1
    """Packed sequences in one forward pass of one data-parallel rank."""
    mix: dict[str, float] = field(default_factory=dict[str, float])
    """Weight of each source, in tokens; empty means sources in proportion to their size."""
    mtp_loss_weight: float | None = None
    """Weight of the MTP loss in this stage; None keeps model.mtp.loss_weight."""
    learning_rate: StageLearningRate = field(default_factory=StageLearningRate)
    parallel: StageParallel = field(default_factory=StageParallel)


@dataclass(kw_only=True, slots=True)
class Curriculum:
    """The stages of a run and their order."""

    stages: dict[str, Stage] = field(default_factory=dict[str, Stage])
    order: list[str] = field(default_factory=list[str])
    """Names of the stages, first to last."""
    eval_tokens: int = 32_768
    """Held-out tokens per evaluation of one context length: whole sequences, at least one."""
    eval_every_steps: int = 0
    """Evaluate every so many steps, besides at each stage's end; 0 means only there."""
    eval_one_ahead: bool = True
    """Also evaluate at the next stage's context length."""


# ---------------------------------------------------------------- checkpoint, monitor, cluster and the run


class WhenBusy(Enum):
    """What a save does that is due while the one before is still being written."""

    wait = "wait"
    """Training waits for the one before."""
    skip = "skip"
    """Leave this one out."""


@dataclass(kw_only=True, slots=True)
class Checkpoint:
    """When checkpoints are written and how many stay. They lie in <dir>/checkpoints."""

    every_steps: int = 0
    """Save every so many steps; 0 means only at stage ends and when asked to stop."""
    keep: int = 2
    """Newest checkpoints kept besides each stage's last (at least 2)."""
    asynchronous: bool = False
    """Write beside training, which waits only for the copy to the host. Saves at a stage's end and when asked
    to stop are waited for all the same."""
    when_busy: WhenBusy = WhenBusy.wait
    max_failures: int = 3
    """The run ends when so many saves in a row could not be written; before, training goes on."""
    load_from: str | None = None
    """Checkpoint folder to start a new run from; an existing run directory wins."""


@dataclass(kw_only=True, slots=True)
class Monitor:
    """What is printed and recorded."""

    console_every_steps: int = 10
    tensorboard: bool = False
    """Also write TensorBoard events (extra: tensorboard)."""
    wandb: bool = False
    """Also log to Weights & Biases (extra: wandb)."""
    wandb_project: str = "k3train"
    balance: BalanceMonitor = field(default_factory=BalanceMonitor)


@dataclass(kw_only=True, slots=True)
class Cluster:
    """How many processes a run has and how they are started."""

    nodes: int = 1
    ranks_per_node: int = 1
    """Processes per node: one per GPU, or any number on the CPU."""
    threads_per_rank: int = 1
    """Intra-op threads of a CPU rank."""
    device_memory_gib: float | None = None
    """Memory of a rank's device: a stage that needs more, by estimate, is refused. None asks the GPU when
    ranks start, 0 tries everything."""
    collective_timeout_seconds: int = 600
    """A collective that waits longer than this ends the run."""
    min_nodes: int = 0
    """Nodes with which a run goes on when others are lost; 0 means that it needs all."""
    max_restarts: int = 3
    """Failures in a row, without a new checkpoint in between, after which ranks are started again."""
    restart_delay_seconds: float = 1.0
    """Wait before the first restart of such a row; it doubles with each, up to 300 seconds."""
    partition: str = ""
    """Slurm partition."""
    account: str = ""
    """Slurm account."""
    time_limit_minutes: int = 0
    """The run saves and stops before it has taken so long. Also Slurm's limit, which 0 leaves to Slurm."""
    stop_margin_seconds: int = 60
    """Time to spare before the time limit, besides what saving and evaluating have taken so far."""


@dataclass(kw_only=True, slots=True)
class Resume:
    """Going on with a run whose settings have changed."""

    override: list[str] = field(default_factory=list[str])
    """Settings, or groups of them, that may differ from what the run was trained with although they decide
    what is trained. The run's history records it."""


@dataclass(kw_only=True, slots=True)
class Run:
    """One training run."""

    name: str = "debug"
    dir: str = "runs/${name}"
    """Everything the run writes: resolved config, checkpoints, metrics."""
    seed: int = 1234
    device: Device = Device.auto
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    optim: Optim = field(default_factory=Optim)
    data: Data = field(default_factory=Data)
    curriculum: Curriculum = field(default_factory=Curriculum)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    monitor: Monitor = field(default_factory=Monitor)
    guards: Guards = field(default_factory=Guards)
    cluster: Cluster = field(default_factory=Cluster)
    resume: Resume = field(default_factory=Resume)
