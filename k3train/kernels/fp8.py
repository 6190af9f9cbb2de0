"""Matrix products in FP8 through Transformer Engine, each operand scaled by the values that it has then.

x [n, k] is a projection's input, weight [m, k], the output x weight^T [n, m]. Operands are bf16 and rounded
right before a product: x and the weight in the forward pass, and again, transposed, with the output's
gradient in the backward pass. So nothing is kept in FP8: parameters, checkpoints, what is kept for the
backward pass and its recomputation are those of bf16, and no scale is a state that a run would have to save.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from k3train.config.fp8_rules import MULTIPLE
from k3train.config.problems import Unavailable
from k3train.config.schema import Fp8
from k3train.kernels.adjacent import joined
from k3train.kernels.main_grad import added, main_grad

_NEEDS = {
    Fp8.tensorwise: ((8, 9), "Ada, Hopper or Blackwell"),
    Fp8.blockwise: ((9, 0), "Hopper"),
    Fp8.mxfp8: ((10, 0), "Blackwell"),
}
"""Least compute capability, and who has it."""
_OLDEST = [2, 20]
"""Version of Transformer Engine; before, its products take other arguments."""


def fits(recipe: Fp8, x: Tensor, weight: Tensor) -> bool:
    """Whether ``x`` [..., k] times ``weight`` [m, k] is multiplied in FP8: bf16 on a GPU, with n, k and m
    multiples of what shares a scale."""
    if recipe is Fp8.none or not x.is_cuda or x.dtype is not torch.bfloat16 or weight.dtype is not x.dtype:
        return False
    unit = MULTIPLE[recipe]
    m, k = weight.shape
    return m % unit == k % unit == x.numel() // k % unit == 0 and x.numel() > 0


def check(recipe: Fp8, device: torch.device) -> None:
    """Raise Unavailable, in a sentence, where ``recipe`` cannot run: no GPU, a GPU without it, no package."""
    if recipe is Fp8.none:
        return
    why = f"model.fp8={recipe.value} multiplies in FP8 on a GPU"
    if device.type != "cuda":
        raise Unavailable(
            f"{why}, and torch sees none here: run where nvidia-smi works, or set model.fp8=none"
        )
    least, names = _NEEDS[recipe]
    if torch.cuda.get_device_capability(device) < least:
        others = [each.value for each, (needed, _) in _NEEDS.items() if needed < least]
        instead = "".join(f"model.fp8={each} or " for each in others)
        raise Unavailable(
            f"{why} with compute capability {least[0]}.{least[1]} ({names}), and this one is "
            f"{torch.cuda.get_device_name(device)}: set {instead}model.fp8=none"
        )
    try:
        products(recipe)
    except ImportError as error:
        raise Unavailable(
            f"{why} through Transformer Engine, and the package transformer_engine cannot be used "
            f"({error}): pip install 'k3train[te]', or set model.fp8=none"
        ) from error


def check_machine(recipe: Fp8) -> None:
    """As ``check`` with the first device that ranks on this machine will take."""
    check(recipe, torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


@cache
def products(recipe: Fp8) -> Products:
    """The products of ``recipe``; raises ImportError without Transformer Engine."""
    return Products(recipe)


class Products:
    """The three products of a projection in one recipe; ``k3train.kernels.linear`` says when each is due."""

    def __init__(self, recipe: Fp8) -> None:
        """Raises ImportError without a Transformer Engine that is new enough."""
        found = version("transformer_engine")
        if [int(part) for part in found.split(".")[:2]] < _OLDEST:
            raise ImportError(f"{found} is older than {'.'.join(map(str, _OLDEST))}")
        from transformer_engine.common import recipe as recipes  # pyright: ignore
        from transformer_engine.pytorch.cpp_extensions import general_gemm  # pyright: ignore
        from transformer_engine.pytorch.quantization import RecipeState  # pyright: ignore

        made: Any = {
            Fp8.tensorwise: recipes.Float8CurrentScaling,
            Fp8.blockwise: recipes.Float8BlockScaling,
            Fp8.mxfp8: recipes.MXFP8BlockScaling,
        }[recipe]()
        self._multiply = general_gemm
        self._fast = recipe is Fp8.tensorwise  # forward, as Transformer Engine does
        self._rows, self._weight = RecipeState.create(
            made, mode="forward", num_quantizers=2
        ).make_quantizers()
        (self._grad,) = RecipeState.create(made, mode="backward", num_quantizers=1).make_quantizers()
        for quantizer in (self._rows, self._weight, self._grad):
            quantizer.internal = True  # plain storage, which costs the host less than a kind of tensor

    def input(self, rows: Tensor) -> Any:
        """x for ``output``."""
        return _rounded(self._rows, rows, transposed=False)

    def output(self, rows: Any, weight: Tensor) -> Tensor:
        """[n, m], bf16."""
        weight = _rounded(self._weight, weight, transposed=False)
        return self._product(weight, rows, layout="TN", fast=self._fast, out_dtype=torch.bfloat16)

    def kept(self, rows: Tensor) -> Any:
        """x for ``weight_gradients``."""
        return _rounded(self._rows, rows)

    def gradient(self, grad: Tensor) -> Any:
        """The output's gradient [n, m] for the other two products."""
        return _rounded(self._grad, grad)

    def input_gradient(self, grad: Any, weight: Tensor, total: Tensor | None) -> Tensor:
        """grad weight [n, k], bf16, added to ``total`` if there is one."""
        weight = _rounded(self._weight, weight)
        return self._product(weight, grad, layout="NN", total=total, out_dtype=torch.bfloat16)

    def weight_gradients(self, weights: Sequence[Tensor], grad: Any, rows: Any) -> list[Tensor]:
        """As ``main_grad.weight_gradients``; sums are fp32."""
        mains = [main_grad(weight) for weight in weights]
        whole = None if any(main is None for main in mains) else joined(mains, 0)  # pyright: ignore
        if whole is not None:
            self._product(rows, grad, layout="NT", total=whole, out_dtype=whole.dtype)
            return [added(weight) for weight in weights]
        found = self._product(rows, grad, layout="NT", out_dtype=torch.float32)
        out = []
        for weight, main, piece in zip(
            weights, mains, found.split([weight.shape[0] for weight in weights]), strict=True
        ):
            if main is None:
                out.append(piece.to(weight.dtype))
            else:
                main += piece
                out.append(added(weight))
        return out

    def _product(
        self,
        a: Any,
        b: Any,
        *,
        layout: str,
        out_dtype: torch.dtype,
        fast: bool = False,
        total: Tensor | None = None,
    ) -> Tensor:
        """b times a, in the sense of cuBLAS; ``fast``: sums of a Hopper product keep fewer bits than fp32."""
        return self._multiply(
            a,
            b,
            out_dtype=out_dtype,
            layout=layout,
            out=total,
            accumulate=total is not None,
            use_split_accumulator=not fast,
            grad=layout != "TN",
        )[0]


def _rounded(quantizer: Any, x: Tensor, *, transposed: bool = True) -> Any:
    """``x`` in FP8, with ``transposed`` also as the products that sum over its rows read it."""
    quantizer.set_usage(rowwise=True, columnwise=transposed)
    return quantizer(x)
