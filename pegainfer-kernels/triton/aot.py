"""How a Triton kernel is compiled ahead of time: each module here lists its kernels, which compile.py compiles."""
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Tile:
    """A matrix of which the kernel loads or stores tiles by TMA: a tensor descriptor that the host makes."""

    dtype: str
    rows: int
    columns: int

    def __str__(self):
        return f"tensordesc<{self.dtype}[{self.rows}, {self.columns}]>"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled variant of a `@triton.jit` function."""

    function: Any
    """Compute capabilities it is compiled for, as 90 for 9.0."""
    architectures: tuple[int, ...]
    """Types of the run-time parameters, in order: a Tile, "i32", or a pointer such as "*bf16", aligned to 16 bytes."""
    signature: dict[str, Any]
    """Values of the `tl.constexpr` parameters."""
    constants: dict[str, Any]
    """Options of triton.compile: num_warps, num_stages, maxnreg."""
    options: dict[str, int]
