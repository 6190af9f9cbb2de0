"""The backward pass of the mix over depth in Gluon: each tensor's next row is a token ahead in its own slot.

A source is under way for as long as a whole token takes: of 9 with 7168 channels some 150 KB a processor are,
where registers hold one source ahead. A thread copies the elements that it reads itself, 16 bytes at a time,
and asks for the next token's once the sums over this one are taken. ``triton_mix.programs_with_slots`` says
which tensors it takes. Imports Triton: import it inside functions only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from k3train.kernels import triton_mix

add_three = gluon.jit(triton_mix.add_three.fn)
source_gradient = gluon.jit(triton_mix.source_gradient.fn)


@gluon.jit
def _fetch(slots, tensors, strides, i: gl.constexpr, row, channel, inside):
    """Start the copy of a row of the ``i``-th tensor, as one group."""
    async_copy.async_copy_global_to_shared(
        slots.index(i), tensors[i] + row * strides[i] + channel, mask=inside
    )
    async_copy.commit_group()


@gluon.jit
def mix_backward(
    tensors,
    strides,
    direction,
    logsum,
    grads,
    partial,
    n,
    channels,
    eps,
    W: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """tensors: the gradient, the result and W sources, [n, channels] each; grads: of the sources.

    partial: fp32 [programs, channels]; its sum is the direction's gradient.
    """
    T: gl.constexpr = W + 2
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    channel = gl.arange(0, BLOCK, layout)
    inside = channel < channels
    u = gl.load(direction + channel, mask=inside, other=0.0)
    grad_u = gl.zeros([BLOCK], gl.float32, layout)
    slots = gl.allocate_shared_memory(tensors[0].dtype.element_ty, [T, BLOCK], plain)
    at = gl.program_id(0).to(gl.int64)
    for i in gl.static_range(T):
        _fetch(slots, tensors, strides, i, at, channel, inside)
    while at < n:
        there = at + gl.num_programs(0)
        more = inside & (there < n)
        lse = gl.load(logsum + at)
        async_copy.wait_group(T - 2)
        g = slots.index(0).load(layout).to(gl.float32)
        # sum_i weight_i (grad . source_i)
        inner = gl.sum(g * slots.index(1).load(layout).to(gl.float32), 0)
        for i in gl.static_range(2):
            _fetch(slots, tensors, strides, i, there, channel, more)
        # one source at a time: two would halve the barriers, but hold 32 registers more and are slower
        for i in gl.static_range(2, T):
            async_copy.wait_group(T - 1)
            v = slots.index(i).load(layout).to(gl.float32)
            dot, square, along_grad = gl.reduce((v * u, v * v, v * g), 0, add_three)
            _fetch(slots, tensors, strides, i, there, channel, more)
            d, along = source_gradient(v, u, g, dot, square, along_grad, inner, lse, channels, eps)
            grad_u += along * v
            gl.store(grads[i - 2] + at * channels + channel, d.to(grads[i - 2].dtype.element_ty), mask=inside)
        at = there
    async_copy.wait_group(0)
    gl.store(partial + gl.program_id(0) * channels + channel, grad_u, mask=inside)
