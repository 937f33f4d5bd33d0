"""Sixteen float32 lanes as TIR expressions; LLVM splits them where registers are narrower."""

from typing import Any

from tvm.script import tirx as T
from tvm.target import codegen

LANES = 16
GROUP = 32  # values that share one quantisation scale, in weights and in activations
LOG2_E = 1.4426950408889634

_REDUCE_MAX = codegen.llvm_lookup_intrinsic_id("llvm.vector.reduce.fmax")
_REDUCE_ADD_INT = codegen.llvm_lookup_intrinsic_id("llvm.vector.reduce.add")
_REDUCE_ADD = codegen.llvm_lookup_intrinsic_id("llvm.vector.reduce.fadd")

# 2**f on [0, 1), highest power first; relative error below 2e-7.
_EXP2 = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def lanes(start: Any) -> Any:
    """The indices `start .. start + 15`."""
    return T.ramp(start, 1, LANES)


def splat(value: Any) -> Any:
    """`value` in every lane."""
    return T.broadcast(value, LANES)


def const(value: float) -> Any:
    """A float32 constant in every lane."""
    return T.broadcast(T.float32(value), LANES)


def reduce_max(vector: Any) -> Any:
    """The largest lane."""
    return T.call_llvm_pure_intrin(_REDUCE_MAX, vector, dtype="float32")


def reduce_add(vector: Any) -> Any:
    """The lanes added one after the other, lane 0 first (no re-association: equal bits on every run)."""
    return T.call_llvm_pure_intrin(_REDUCE_ADD, T.float32(0), vector, dtype="float32")


def reduce_add_int(vector: Any) -> Any:
    """The sum of int32 lanes."""
    return T.call_llvm_pure_intrin(_REDUCE_ADD_INT, vector, dtype="int32")


def exp2(vector: Any) -> Any:
    """`2 ** vector` by a polynomial and the exponent's bits; below -120 it stays at 2 ** -120."""
    clipped = T.max(vector, const(-120.0))
    whole = T.floor(clipped)
    fraction = clipped - whole
    power = const(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = power * fraction + const(coefficient)
    exponent = T.shift_left(T.Cast("int32x16", whole) + splat(T.int32(127)), splat(T.int32(23)))
    return T.reinterpret(exponent, dtype="float32x16") * power


def silu(vector: Any) -> Any:
    """`x * sigmoid(x)`."""
    return vector / (const(1.0) + exp2(vector * const(-LOG2_E)))


def absolute(vector: Any) -> Any:
    """`|x|`."""
    return T.max(vector, const(0.0) - vector)
