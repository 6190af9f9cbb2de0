"""Names and shapes of the release's image encoder and projector, which k3train carries but does not train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from k3train.checkpoint.hf.names import Shape
from k3train.checkpoint.manifest import CheckpointError

PREFIXES = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """Sizes of MoonViT-V2 and its projector (k3 spec section 9), by their names in ``vision_config``."""

    vt_num_hidden_layers: int
    vt_hidden_size: int
    vt_intermediate_size: int
    qkv_hidden_size: int
    patch_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    merge: int
    """Patches that the projector takes as one."""
    text_hidden_size: int


def read_vision(config: dict[str, Any]) -> Vision:
    """Sizes in a release's ``vision_config``. Raises CheckpointError when some are missing or no number."""
    sizes: dict[str, Any] = {name: config.get(name) for name in Vision.__dataclass_fields__}
    sizes["merge"] = _product(config.get("merge_kernel_size"))
    wrong = [name for name, size in sizes.items() if type(size) is not int or size < 1]
    if wrong:
        listed = ", ".join("merge_kernel_size" if name == "merge" else name for name in wrong)
        raise CheckpointError(f"config.json: vision_config has no usable {listed}")
    return Vision(**sizes)


def vision_tensors(vision: Vision) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor of the encoder and the projector; all are bf16."""
    d, inner, attention = vision.vt_hidden_size, vision.vt_intermediate_size, vision.qkv_hidden_size
    yield "vision_tower.patch_embed.proj.weight", (d, 3, vision.patch_size, vision.patch_size)
    positions = (vision.init_pos_emb_height, vision.init_pos_emb_width, d)
    yield "vision_tower.patch_embed.pos_emb.weight", positions
    for layer in range(vision.vt_num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{layer}"
        yield f"{block}.norm0.weight", (d,)
        yield f"{block}.wqkv.weight", (3 * attention, d)
        yield f"{block}.wo.weight", (d, attention)
        yield f"{block}.norm1.weight", (d,)
        yield f"{block}.mlp.fc0.weight", (inner, d)
        yield f"{block}.mlp.fc1.weight", (d, inner)
    yield "vision_tower.encoder.final_layernorm.weight", (d,)
    merged = vision.merge * d
    yield "mm_projector.proj.0.weight", (merged, merged)
    yield "mm_projector.proj.2.weight", (vision.text_hidden_size, merged)
    yield "mm_projector.post_norm.weight", (vision.text_hidden_size,)


def _product(pair: Any) -> int | None:
    usable = isinstance(pair, list) and len(pair) == 2 and all(type(size) is int for size in pair)
    return pair[0] * pair[1] if usable else None
