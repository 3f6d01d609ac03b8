//! Activations as the GEMMs take them: planes of bf16 in the workspace, or the tensor itself
//! (csrc/deepseek_v4/gemm.cu).

use crate::cuda::abi::{Planes, Target};
use crate::cuda::scratch::Scratch;
use crate::limits::deepseek_v4_gemm::{DEPTH, THREADS};
use crate::ops::Matrix;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError};

/// The kernel entries' tiles: tokens of each.
pub(super) const TILES: [usize; 4] = [8, 16, 32, 64];

/// The smallest tile for `tokens` tokens, as an index into [`TILES`].
pub(super) fn tile(tokens: usize) -> usize {
    TILES.iter().position(|tile| tokens <= *tile).unwrap_or(TILES.len() - 1)
}

/// Number of the weight's format in the order of the entries: bf16, FP8, FP4. The op refuses others.
pub(super) fn format(w: &Matrix) -> usize {
    match w {
        Matrix::Bf16(_) | Matrix::Grouped { .. } | Matrix::Stacked(_) => 0,
        Matrix::Fp8 { .. } => 1,
        Matrix::Fp4 { .. } => 2,
    }
}

/// Bytes of a block's ring of steps; see `kStageBytes`.
pub(super) fn shared_bytes(w: &Matrix, tile: usize) -> usize {
    use crate::limits::deepseek_v4_gemm::{ROWS, STAGES};
    let weights = ROWS * DEPTH * 16 / [8, 16, 32][format(w)];
    let scales = if format(w) == 2 { ROWS * DEPTH / 32 } else { 0 };
    (weights + scales + TILES[tile] * (2 * DEPTH + 64)) * STAGES
}

/// Form in which the values of an activation enter a GEMM.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Parts {
    /// bf16, unchanged.
    Same,
    /// f32 as the sum of three bf16 numbers.
    Three,
}

impl Parts {
    /// Form of activations of `dtype`.
    pub fn of(dtype: DType) -> Self {
        if dtype == DType::F32 { Self::Three } else { Self::Same }
    }

    /// Planes of the operand.
    pub fn planes(self) -> usize {
        if self == Self::Three { 3 } else { 1 }
    }

    /// Bytes of the workspace for each value.
    pub fn bytes(self) -> usize {
        if self == Self::Same { 0 } else { 2 * self.planes() }
    }
}

/// Values in device memory: bf16 or f32.
#[derive(Clone, Copy)]
pub(super) struct Values {
    pub address: u64,
    pub dtype: DType,
}

/// A GEMM's operand: address, planes, and elements from one to the next.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub address: u64,
    pub planes: usize,
    pub plane: u64,
}

/// `elements` activations as an operand, in `scratch` unless they are one already.
pub(super) fn operand(
    exec: &mut Exec,
    op: &'static str,
    x: Values,
    elements: usize,
    scratch: &mut Scratch,
) -> Result<Operand, OpError> {
    let parts = Parts::of(x.dtype);
    let planes = parts.planes();
    if parts == Parts::Same {
        return Ok(Operand { address: x.address, planes, plane: 0 });
    }
    let (address, plane) = (scratch.take(op, elements * parts.bytes())?, elements as u64);
    let arguments = Planes { x: x.address, out: Target::Scratch(address), elements, plane, planes };
    let launch = Planes::planes.launch(exec.gpu()?, op, arguments)?;
    // SAFETY: the caller's buffers have `elements` values in f32; the grid covers them.
    unsafe { launch.run([elements.div_ceil(THREADS), 1, 1], THREADS)? };
    Ok(Operand { address, planes, plane })
}
