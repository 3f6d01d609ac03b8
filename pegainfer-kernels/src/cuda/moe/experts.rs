//! `ops::moe::experts` (csrc/moe/{pairs,gemv,mma}.cu).

use crate::choice::GroupedGemm;
use crate::cuda::abi::{
    Entry, MoeAddPairs, MoeDownGemv, MoeDownMma, MoeGateUpGemv, MoeGateUpMma, MoeGroupPairs, Target,
};
use crate::cuda::scratch::Scratch;
use crate::cuda::vectors;
use crate::limits::moe::{GROUP_THREADS, MAX_CHOSEN, MAX_EXPERTS, SUM_THREADS};
use crate::limits::{moe_gemv, moe_mma};
use crate::moe_operands::Experts;
use crate::ops::{BlockScales, Matrix, MatrixRef};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

const OP: &str = "experts";

/// Entries by format (bf16, FP8), and for the GEMM by tile.
const GATE_UP_GEMV: [Entry<MoeGateUpGemv<'static>>; 2] =
    [MoeGateUpGemv::moe_gate_up_gemv_bf16, MoeGateUpGemv::moe_gate_up_gemv_fp8];
const DOWN_GEMV: [Entry<MoeDownGemv<'static>>; 2] = [MoeDownGemv::moe_down_gemv_bf16, MoeDownGemv::moe_down_gemv_fp8];
const GATE_UP_MMA: [[Entry<MoeGateUpMma<'static>>; 3]; 2] = [
    [
        MoeGateUpMma::moe_gate_up_mma_bf16_16,
        MoeGateUpMma::moe_gate_up_mma_bf16_32,
        MoeGateUpMma::moe_gate_up_mma_bf16_64,
    ],
    [MoeGateUpMma::moe_gate_up_mma_fp8_16, MoeGateUpMma::moe_gate_up_mma_fp8_32, MoeGateUpMma::moe_gate_up_mma_fp8_64],
];
const DOWN_MMA: [[Entry<MoeDownMma<'static>>; 3]; 2] = [
    [MoeDownMma::moe_down_mma_bf16_16, MoeDownMma::moe_down_mma_bf16_32, MoeDownMma::moe_down_mma_bf16_64],
    [MoeDownMma::moe_down_mma_fp8_16, MoeDownMma::moe_down_mma_fp8_32, MoeDownMma::moe_down_mma_fp8_64],
];

/// One matrix of whole experts.
#[derive(Clone, Copy)]
struct Weight<'a> {
    codes: &'a Tensor,
    /// Address of the scales of an FP8 matrix, else 0.
    scales: u64,
}

impl<'a> Weight<'a> {
    fn of(w: MatrixRef<'a>) -> Result<Self, OpError> {
        let message = match w {
            MatrixRef::Bf16(codes) => return Ok(Self { codes, scales: 0 }),
            MatrixRef::Fp8(codes, BlockScales::F32(scales)) if codes.rows_cols().1.is_multiple_of(16) => {
                return Ok(Self { codes, scales: scales.device() });
            }
            MatrixRef::Fp8(..) => "experts in FP8 of another width than a multiple of 16: use --device cpu",
            _ => "experts in a format other than bf16 and FP8 have no GPU kernel yet: use --device cpu",
        };
        Err(OpError { op: OP, message: message.to_owned() })
    }

    /// Index of the format among the entries.
    fn format(self) -> usize {
        usize::from(self.scales != 0)
    }
}

/// Neighbouring experts, whose matrices are in one part of each stack.
struct Part<'a> {
    gate_up: Weight<'a>,
    down: Weight<'a>,
    first: usize,
    count: usize,
}

/// The matrices of a stack.
fn matrices(w: &Matrix) -> &[Matrix] {
    if let Matrix::Stacked(parts) = w { parts } else { std::slice::from_ref(w) }
}

/// The parts of the stacks of experts.
fn parts(experts: &Experts, hidden: usize) -> Result<Vec<Part<'_>>, OpError> {
    let (gate_up, down) = (matrices(&experts.gate_up), matrices(&experts.down));
    let mut parts = Vec::new();
    let mut first = 0;
    for (gate_up, down) in gate_up.iter().zip(down) {
        let count = down.shape().0 / hidden;
        if gate_up.shape().0 != count * 2 * experts.width() {
            break;
        }
        parts.push(Part { gate_up: Weight::of(gate_up.as_ref())?, down: Weight::of(down.as_ref())?, first, count });
        first += count;
    }
    if first == experts.count {
        return Ok(parts);
    }
    Err(OpError { op: OP, message: "gate_up and down are stacked in parts of other experts".to_owned() })
}

/// Tokens of a pass, and their places in the workspace.
struct Pass<'a> {
    kernel: GroupedGemm,
    tokens: Range<usize>,
    /// Experts of a token.
    k: usize,
    chosen: u64,
    weights: u64,
    x: u64,
    hidden: usize,
    width: usize,
    /// Rows of `h` and `y` are pairs.
    h: u64,
    y: u64,
    /// Lists of pairs and tiles, overwritten by each part.
    pairs: u64,
    tiles: u64,
    out: &'a Tensor,
}

/// Tiles of a part, in the workspace; without lists each pair is a tile.
#[derive(Clone, Copy)]
struct Tiles {
    tiles: u64,
    pairs: u64,
    most: usize,
}

/// Device address of row `first` of a matrix.
fn row(tensor: &Tensor, first: usize) -> u64 {
    tensor.device() + (first * tensor.rows_cols().1 * tensor.dtype().size()) as u64
}

/// Row tiles of a block of a GEMV with so many columns, and warps that share each.
fn warps(k: usize) -> (usize, usize) {
    let most = moe_gemv::THREADS / 32;
    let splits = k.div_ceil(moe_gemv::COLUMNS).div_ceil(moe_gemv::UNITS).clamp(1, most);
    (most / splits, splits)
}

/// Bytes of shared memory of a block of a GEMM.
fn shared_bytes(w: Weight<'_>, tile: usize) -> usize {
    let weights = moe_mma::ROWS * moe_mma::DEPTH * w.codes.dtype().size();
    moe_mma::STAGES * (weights + tile * (2 * moe_mma::DEPTH + 64))
}

impl Pass<'_> {
    fn count(&self) -> usize {
        self.tokens.len() * self.k
    }

    /// Groups the pairs with the experts of a part. The pairs of a single token are tiles as they are.
    fn group(&self, exec: &mut Exec, part: &Part<'_>) -> Result<Tiles, OpError> {
        if self.kernel == GroupedGemm::Gemv && self.tokens.len() == 1 {
            return Ok(Tiles { tiles: 0, pairs: 0, most: self.count() });
        }
        let Self { chosen, pairs, tiles, kernel, .. } = *self;
        let (count, first, experts) = (self.count(), part.first, part.count);
        let arguments = MoeGroupPairs {
            chosen,
            pairs: Target::Scratch(pairs),
            tiles,
            count,
            first,
            experts,
            tokens: kernel.tile(),
        };
        let launch = MoeGroupPairs::moe_group_pairs.launch(exec.gpu()?, OP, arguments)?;
        // SAFETY: one block; the buffers have place for all pairs and tiles.
        unsafe { launch.overlapped().run([1, 1, 1], GROUP_THREADS)? };
        Ok(Tiles { tiles, pairs, most: kernel.most_tiles(count, experts) })
    }

    fn gate_up(&self, exec: &mut Exec, part: &Part<'_>, of: Tiles) -> Result<(), OpError> {
        let Self { x, chosen, weights, h, k: experts_of_token, width, hidden: k, .. } = *self;
        let Weight { codes: w, scales } = part.gate_up;
        let (format, first, experts) = (part.gate_up.format(), part.first, part.count);
        let Tiles { tiles, pairs, most } = of;
        let gpu = exec.gpu()?;
        let GroupedGemm::Mma(tile) = self.kernel else {
            let (row_tiles, splits) = warps(k);
            let arguments = MoeGateUpGemv {
                x,
                w,
                scales,
                chosen,
                tiles,
                pairs,
                weights,
                h,
                experts_of_token,
                first,
                experts,
                width,
                k,
                splits,
            };
            let launch = GATE_UP_GEMV[format].launch(gpu, OP, arguments)?.overlapped_late_release();
            let grid = [width.div_ceil(row_tiles * moe_gemv::ROWS / 2), most, 1];
            // SAFETY: the op checked the shapes; the grid covers all columns of `h` of every tile.
            return unsafe { launch.run(grid, 32 * row_tiles * splits) };
        };
        let arguments =
            MoeGateUpMma { x, w, scales, chosen, tiles, pairs, weights, h, experts_of_token, first, experts, width, k };
        let launch = GATE_UP_MMA[format][tile_index(tile)].launch(gpu, OP, arguments)?;
        let launch = launch.overlapped().shared(shared_bytes(part.gate_up, tile));
        // SAFETY: as above.
        unsafe { launch.run([width.div_ceil(moe_mma::ROWS / 2), most, 1], moe_mma::THREADS) }
    }

    fn down(&self, exec: &mut Exec, part: &Part<'_>, of: Tiles) -> Result<(), OpError> {
        let Self { chosen, h, y, hidden, width: k, .. } = *self;
        let Weight { codes: w, scales } = part.down;
        let (format, first, experts) = (part.down.format(), part.first, part.count);
        let Tiles { tiles, pairs, most } = of;
        let gpu = exec.gpu()?;
        let GroupedGemm::Mma(tile) = self.kernel else {
            let (row_tiles, splits) = warps(k);
            let arguments = MoeDownGemv { h, w, scales, chosen, tiles, pairs, y, first, experts, hidden, k, splits };
            let launch = DOWN_GEMV[format].launch(gpu, OP, arguments)?.early(w).overlapped();
            let grid = [hidden.div_ceil(row_tiles * moe_gemv::ROWS), most, 1];
            // SAFETY: the op checked the shapes; the grid covers all columns of `y` of every tile.
            return unsafe { launch.run(grid, 32 * row_tiles * splits) };
        };
        let arguments = MoeDownMma { h, w, scales, chosen, tiles, pairs, y, first, experts, hidden, k };
        let launch = DOWN_MMA[format][tile_index(tile)].launch(gpu, OP, arguments)?;
        let launch = launch.overlapped().shared(shared_bytes(part.down, tile));
        // SAFETY: as above.
        unsafe { launch.run([hidden.div_ceil(moe_mma::ROWS), most, 1], moe_mma::THREADS) }
    }

    fn add(&self, exec: &mut Exec, experts: usize) -> Result<(), OpError> {
        let Self { y, chosen, hidden, k, .. } = *self;
        let out = Target::Scratch(row(self.out, self.tokens.start));
        let arguments = MoeAddPairs { y, chosen, out, hidden, k, first: 0, experts };
        let launch = MoeAddPairs::moe_add_pairs.launch(exec.gpu()?, OP, arguments)?.writes(self.out);
        let blocks = hidden.div_ceil(8 * SUM_THREADS);
        // SAFETY: the op checked the shapes; a thread has eight columns of a token of the pass.
        unsafe { launch.overlapped().run([self.tokens.len(), blocks, 1], SUM_THREADS) }
    }
}

/// Index of the entry for a tile of 16, 32 or 64 pairs.
fn tile_index(tile: usize) -> usize {
    tile.ilog2() as usize - 4
}

pub(crate) fn experts(
    exec: &mut Exec,
    kernel: GroupedGemm,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    experts: &Experts,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, hidden), k, width) = (x.rows_cols(), chosen.rows_cols().1, experts.width());
    vectors(OP, hidden)?;
    vectors(OP, width)?;
    if experts.count > MAX_EXPERTS || k > MAX_CHOSEN {
        let message = format!("{k} of {} experts: the GPU kernel takes {MAX_CHOSEN} of {MAX_EXPERTS}", experts.count);
        return Err(OpError { op: OP, message });
    }
    let parts = parts(experts, hidden)?;
    let size = pass_tokens(hidden, width, k);
    for from in (0..tokens).step_by(size) {
        let tokens = from..(from + size).min(tokens);
        let count = tokens.len() * k;
        let mut scratch = Scratch::new(exec)?;
        let mut take = |elements: usize, dtype: DType| scratch.take(OP, elements * dtype.size());
        let (h, y) = (take(count * width, DType::Bf16)?, take(count * hidden, DType::Bf16)?);
        let most_tiles = kernel.most_tiles(count, experts.count);
        let (pairs, tiles) = (take(count, DType::U32)?, take(1 + 3 * most_tiles, DType::U32)?);
        let (chosen, weights, x) = (row(chosen, from), row(weights, from), row(x, from));
        let out = &*out;
        let pass = Pass { kernel, tokens, k, chosen, weights, x, hidden, width, h, y, pairs, tiles, out };
        for part in &parts {
            let of = pass.group(exec, part)?;
            pass.gate_up(exec, part, of)?;
            pass.down(exec, part, of)?;
        }
        pass.add(exec, experts.count)?;
    }
    Ok(())
}

/// Tokens of a pass whose intermediates fit the workspace. A pair has rows of `h` and `y`, a place in the list, and
/// at most a tile.
fn pass_tokens(hidden: usize, width: usize, k: usize) -> usize {
    let pair = (hidden + width) * DType::Bf16.size() + 4 * DType::U32.size();
    ((WORKSPACE_BYTES - (1 << 20)) / (k.max(1) * pair)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the workspace that a pass of so many tokens takes.
    fn bytes(tokens: usize, k: usize, count: usize, (hidden, width): (usize, usize)) -> usize {
        let pairs = tokens * k;
        let kernel = GroupedGemm::choose(pairs, count);
        let words = [pairs, 1 + 3 * kernel.most_tiles(pairs, count)].map(|words| 4 * words);
        let rows = [2 * pairs * width, 2 * pairs * hidden];
        rows.into_iter().chain(words).map(|bytes| bytes.next_multiple_of(256)).sum()
    }

    #[test]
    fn a_pass_fits_the_workspace() {
        for (count, k, hidden, width) in
            [(16, 4, 256, 128), (128, 8, 2048, 768), (257, 9, 2048, 512), (513, 11, 4096, 1024), (1, 1, 8, 8)]
        {
            let tokens = pass_tokens(hidden, width, k);
            for tokens in [1, tokens / 2, tokens] {
                let bytes = bytes(tokens, k, count, (hidden, width));
                assert!(bytes <= WORKSPACE_BYTES, "{tokens} tokens of {count} experts: {bytes}");
            }
            assert!(bytes(2 * tokens, k, count, (hidden, width)) > WORKSPACE_BYTES, "half of the workspace is unused");
        }
    }

    #[test]
    fn the_warps_of_a_gemv_have_whole_shares() {
        // Columns, row tiles of a block, warps of each.
        for (k, expected) in
            [(128, (8, 1)), (512, (4, 2)), (768, (2, 3)), (1024, (2, 4)), (2048, (1, 8)), (8192, (1, 8))]
        {
            assert_eq!(warps(k), expected, "{k} columns");
        }
    }
}
