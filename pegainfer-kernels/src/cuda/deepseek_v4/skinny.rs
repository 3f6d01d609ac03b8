//! `matmul`, `grouped_matmul`, `project` and `pack_rows` at few tokens on Hopper (csrc/deepseek_v4/skinny.cu; bf16
//! weights of many rows: csrc/gemm/skinny_wgmma.cu).

use crate::choice::{self, DenseGemm, GemmShape, Output, Skinny, WeightFormat};
use crate::cuda::abi::{Entry, PackRows, SkinnyExact, SkinnyPacked, SkinnyProject, Target};
use crate::cuda::scratch::Scratch;
use crate::cuda::skinny_wgmma::skinny_wgmma;
use crate::ops::deepseek_v4::{Activation, Projected, Projections, packed_bytes};
use crate::ops::{BlockScales, Matrix};
use pegainfer_core::cuda::{Launch, WORKSPACE_BYTES};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Maximum shared memory of a block on Hopper.
const SHARED_BYTES: usize = 227 << 10;
/// Rows of a tile of weights.
const TILE_ROWS: usize = 64;
/// Minimum number of rows of a bf16 weight, such as an output matrix, for csrc/gemm/skinny_wgmma.cu, whose blocks read
/// several tiles without a pause.
const STREAMED_ROWS: usize = 16 << 10;
/// Columns of a step.
const DEPTH: usize = 128;
const PACKED: [Entry<SkinnyPacked<'static>>; 3] =
    [SkinnyPacked::skinny_packed_8, SkinnyPacked::skinny_packed_16, SkinnyPacked::skinny_packed_32];
const SPLIT: [Entry<SkinnyPacked<'static>>; 2] = [SkinnyPacked::skinny_split_8, SkinnyPacked::skinny_split_16];
const EXACT: [Entry<SkinnyExact<'static>>; 3] =
    [SkinnyExact::skinny_exact_8, SkinnyExact::skinny_exact_16, SkinnyExact::skinny_exact_32];
const PROJECT: [Entry<SkinnyProject<'static>>; 3] =
    [SkinnyProject::skinny_project_8, SkinnyProject::skinny_project_16, SkinnyProject::skinny_project_32];

/// Split of the sum over k (split-K). Depends only on the shape of the weight, so that a row's bits do not depend on
/// the other rows of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SkinnyPlan {
    /// Segments of k of a block, each summed by a warpgroup.
    pub splits: usize,
    /// Blocks of a cluster, which share the columns of a tile.
    pub blocks: usize,
}

impl SkinnyPlan {
    /// The plan for a weight `[n, k]`.
    fn new(n: usize, k: usize) -> Self {
        let (tiles, steps) = (n.div_ceil(TILE_ROWS), k.div_ceil(DEPTH));
        match steps {
            16.. if tiles <= 8 => Self { splits: 2, blocks: 8 },
            16.. => Self { splits: 4, blocks: 2 },
            2.. => Self { splits: 2, blocks: 1 },
            _ => Self { splits: 1, blocks: 1 },
        }
    }

    /// Bytes of a block's shared memory; see `Memory` in csrc/deepseek_v4/skinny.cuh. `tokens`: rows of operand B;
    /// `columns`: bytes of an element of it; `results`: tokens of the result.
    fn shared(self, k: usize, (tokens, columns): (usize, usize), results: usize) -> usize {
        let all = k / DEPTH;
        let each = all.div_ceil(self.splits * self.blocks);
        let steps = (self.splits * each).min(all);
        let parts = if self.blocks > 1 { results * TILE_ROWS * 4 } else { 0 };
        steps * tokens * (DEPTH * columns + 4) + self.splits * tokens * TILE_ROWS * 4 + parts
    }
}

/// True if these kernels, which read the weight again for each 32 tokens, are suitable for this many tokens. Weights
/// below [`DenseGemm::MIN_ELEMENTS`] stay in the L2 cache, so for these any number is.
fn is_few_tokens(tokens: usize, (n, k): (usize, usize)) -> bool {
    tokens < DenseGemm::MIN_TOKENS || n * k < DenseGemm::MIN_ELEMENTS
}

/// The smallest of the first `tiles` of the tiles 8, 16 and 32 that holds `tokens` tokens, or else the largest: its
/// place, and its tokens.
fn tile(tokens: usize, tiles: usize) -> (usize, usize) {
    let place = [8, 16, 32].iter().take(tiles - 1).position(|tile| tokens <= *tile).unwrap_or(tiles - 1);
    (place, 8 << place)
}

/// True if the kernels support the format of the weight: FP8 with E8M0 scales, or bf16.
fn is_supported(w: &Matrix) -> bool {
    matches!(w, Matrix::Fp8 { scale: BlockScales::E8m0(_), .. } | Matrix::Bf16(_))
}

/// True if `skinny_gemm` takes these operands.
fn supports(exec: &mut Exec, x: &Tensor, (w, groups): (&Matrix, usize)) -> Result<bool, OpError> {
    let (m, (n, k)) = (x.rows_cols().0, w.shape());
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    let whole = k.is_multiple_of(DEPTH) && (groups == 1 || (n / groups).is_multiple_of(TILE_ROWS));
    let columns = if w.is_quantized() { 1 } else { 2 };
    let fits = SkinnyPlan::new(n, k).shared(k, (32, columns), 32) <= SHARED_BYTES;
    // Two rows per token if they are packed here: small weights serve any number of tokens.
    let packs = 2 * m * groups * packed_bytes(k) <= WORKSPACE_BYTES;
    Ok(hopper && whole && fits && packs && is_supported(w) && x.dtype() == DType::Bf16 && is_few_tokens(m, (n, k)))
}

/// True if `matmul_rounding` runs these kernels for `x` and `w` on this device.
pub(crate) fn rounds_few(exec: &mut Exec, x: &Tensor, w: &Matrix) -> Result<bool, OpError> {
    Ok(w.is_quantized() && supports(exec, x, (w, 1))?)
}

/// `out = x wᵀ`, or of `groups` groups of rows of `w`, each with its part of the columns of `x`. Returns false, and
/// launches nothing, if other kernels are faster or this one does not take the operands. `rounded`: the reference
/// rounds `x` if `w` is in FP8. Rows that do not come packed are packed in the workspace.
pub(super) fn skinny_gemm(
    exec: &mut Exec,
    op: &'static str,
    x: Activation<'_>,
    (w, groups): (&Matrix, usize),
    rounded: bool,
    out: &mut Tensor,
) -> Result<bool, OpError> {
    let ((m, stride), (n, k)) = (x.values.rows_cols(), w.shape());
    if !supports(exec, x.values, (w, groups))? {
        return Ok(false);
    }
    if m == 0 {
        return Ok(true);
    }
    let plan = SkinnyPlan::new(n, k);
    let (to_f32, group_rows, splits) = (usize::from(out.dtype() == DType::F32), n / groups, plan.splits);
    let rows = n.div_ceil(TILE_ROWS) * plan.blocks;
    let (codes, scales) = w.device();
    if let (Matrix::Bf16(w), 1, STREAMED_ROWS..) = (w, groups, n) {
        return streamed(exec, op, x.values, w, out);
    }
    if !w.is_quantized() {
        let (place, tokens) = tile(m, EXACT.len());
        let arguments =
            SkinnyExact { x: x.values, w: codes, out: out.device(), m, n, k, stride, group_rows, splits, to_f32 };
        let launch = EXACT[place].launch(exec.gpu()?, op, arguments)?.early(codes).writes(out);
        let shared = plan.shared(k, (tokens, 2), tokens);
        return run(launch, plan, (rows, m.div_ceil(tokens)), shared).map(|()| true);
    }
    let entries = if rounded { &PACKED[..] } else { &SPLIT[..] };
    let packed = match x.packed {
        Some(packed) => packed.device(),
        None => packed_rows(exec, op, x.values, (m * groups, k), !rounded)?,
    };
    let (place, tokens) = tile(m, entries.len());
    let operand = (if rounded { tokens } else { 2 * tokens }, 1);
    let arguments =
        SkinnyPacked { x: packed, w: codes, scales, out: out.device(), m, n, k, group_rows, splits, to_f32 };
    let launch = entries[place].launch(exec.gpu()?, op, arguments)?.early(codes).writes(out);
    // In `grouped_matmul` with few tokens, a block has all tiles of tokens, so that it reads the weight once.
    let parts = if !rounded && m < DenseGemm::MIN_TOKENS { 1 } else { m.div_ceil(tokens) };
    run(launch, plan, (rows, parts), plan.shared(k, operand, tokens)).map(|()| true)
}

/// The GEMM with a bf16 weight of many rows, by csrc/gemm/skinny_wgmma.cu.
fn streamed(exec: &mut Exec, op: &'static str, x: &Tensor, w: &Tensor, out: &mut Tensor) -> Result<bool, OpError> {
    let ((m, k), n) = (x.rows_cols(), w.rows_cols().0);
    let output = if out.dtype() == DType::F32 { Output::F32 } else { Output::Bf16 };
    let shape = GemmShape { m, n, k, output, format: WeightFormat::Bf16 };
    let Some(Some(Skinny::Wgmma(plan))) = choice::gpu(exec)?.map(|gpu| Skinny::choose(&gpu, shape)) else {
        return Ok(false);
    };
    skinny_wgmma(exec.gpu()?, op, (x, w), (&plan, output), Target::Tensor(out)).map(|()| true)
}

/// True if `sparse_attention` may pack an output like `out`, and `grouped_matmul` with `w` takes it.
pub(crate) fn takes_split(exec: &mut Exec, out: &Tensor, w: &Matrix) -> Result<bool, OpError> {
    let &[tokens, heads, dim] = out.shape() else { return Ok(false) };
    let groups = heads * dim / w.shape().1.max(1);
    let few = tokens < DenseGemm::MIN_TOKENS && dim.is_multiple_of(DEPTH) && groups > 0;
    Ok(few && w.is_quantized() && supports(exec, out, (w, groups))?)
}

/// Packs `rows` rows of `k` columns of `x` in the workspace, `split` into two rows each. Returns the address.
fn packed_rows(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    (rows, k): (usize, usize),
    split: bool,
) -> Result<u64, OpError> {
    let (entry, parts) = if split { (PackRows::pack_split_rows, 2) } else { (PackRows::pack_rows, 1) };
    let address = Scratch::new(exec)?.take(op, rows * parts * packed_bytes(k))?;
    pack(exec, op, entry, PackRows { x, out: Target::Scratch(address), rows, k })?;
    Ok(address)
}

/// Launches a skinny kernel. `grid`: blocks for all tiles of rows, and tiles of tokens.
fn run(launch: Launch, plan: SkinnyPlan, grid: (usize, usize), shared: usize) -> Result<(), OpError> {
    let launch = launch.cluster(plan.blocks).overlapped().shared(shared);
    // SAFETY: the op checked the shapes; the grid covers `out`, and a kernel checks rows and tokens against its ends.
    unsafe { launch.run([grid.0, grid.1, 1], plan.splits * 128) }
}

/// True if [`project`] takes these operands.
pub(crate) fn projects(
    exec: &mut Exec,
    x: &Tensor,
    rounded: Activation<'_>,
    weights: &Projections<'_>,
) -> Result<bool, OpError> {
    let bf16 = |w: &Matrix| matches!(w, Matrix::Bf16(_));
    let low = weights.low.iter().all(|w| w.is_quantized());
    if rounded.packed.is_none() || !low || weights.all().skip(2).any(|w| !bf16(w)) {
        return Ok(false);
    }
    for w in weights.all() {
        if !supports(exec, x, (w, 1))? {
            return Ok(false);
        }
    }
    Ok(project_plan(x.rows_cols().1, 32).1 <= SHARED_BYTES)
}

/// The plan of [`project`] for all of its weights, that of a weight of many rows, and bytes of shared memory for a tile
/// of `tokens` tokens.
fn project_plan(k: usize, tokens: usize) -> (SkinnyPlan, usize) {
    let plan = SkinnyPlan::new(usize::MAX, k);
    (plan, plan.shared(k, (tokens, 2), tokens))
}

/// `project` on checked operands that [`projects`] accepts: all GEMMs in one launch.
pub(crate) fn project(
    exec: &mut Exec,
    op: &'static str,
    x: Activation<'_>,
    weights: &Projections<'_>,
    out: &mut Projected<'_>,
) -> Result<(), OpError> {
    let (m, k) = x.values.rows_cols();
    let Some(packed) = x.packed.filter(|_| exec.device() == Device::Cuda && m > 0) else { return Ok(()) };
    let [(w0, scales0), (w1, scales1)] = weights.low.map(Matrix::device);
    let pair = |i: usize| weights.pairs[i].map_or([0, 0], |pair| pair.map(|w| w.device().0.device()));
    let rows = |w: Option<&Matrix>| w.map_or(0, |w| w.shape().0);
    let (n2, n4) = (rows(weights.pairs[0].map(|pair| pair[0])), rows(weights.pairs[1].map(|pair| pair[0])));
    let (n0, n1, n6) = (weights.low[0].shape().0, weights.low[1].shape().0, rows(weights.last));
    let mut sums = [0; 4];
    for (i, out) in out.pairs.iter().enumerate().filter_map(|(i, out)| Some((i, out.as_ref()?))) {
        (sums[2 * i], sums[2 * i + 1]) = (out[0].device(), out[1].device());
    }
    let ([w2, w3], [w4, w5]) = (pair(0), pair(1));
    let (place, tokens) = tile(m, 3);
    let (plan, shared) = project_plan(k, tokens);
    let last = out.last.as_ref().map_or(0, |out| out.device());
    let [out0, out1] = &mut out.low;
    let arguments = SkinnyProject {
        x: x.values,
        packed,
        w0,
        scales0,
        w1,
        scales1,
        w2,
        w3,
        w4,
        w5,
        w6: weights.last.map_or(0, |w| w.device().0.device()),
        out0,
        out1,
        out2: sums[0],
        out3: sums[1],
        out4: sums[2],
        out5: sums[3],
        out6: last,
        m,
        k,
        splits: plan.splits,
        n0,
        n1,
        n2,
        n4,
        n6,
    };
    let mut launch = PROJECT[place].launch(exec.gpu()?, op, arguments)?;
    launch = weights.all().fold(launch, |launch, w| launch.early(w.device().0));
    let outputs = out.pairs.iter().flatten().flatten().map(|out| &**out).chain(out.last.as_deref());
    launch = outputs.fold(launch, |launch, out| launch.writes(out));
    let tiles: usize = [n0, n1, n2, n2, n4, n4, n6].iter().map(|n| n.div_ceil(TILE_ROWS)).sum();
    run(launch, plan, (tiles * plan.blocks, m.div_ceil(tokens)), shared)
}

/// `pack_rows` on checked operands.
pub(crate) fn pack_rows(exec: &mut Exec, x: &Tensor, packed: &mut Tensor) -> Result<(), OpError> {
    let (rows, k) = x.rows_cols();
    pack(exec, "pack_rows", PackRows::pack_rows, PackRows { x, out: Target::Tensor(packed), rows, k })
}

/// Packs rows of `columns` columns of `x` in the form that `grouped_matmul` takes.
pub(super) fn pack_split(
    exec: &mut Exec,
    op: &'static str,
    x: &Tensor,
    columns: usize,
    packed: &mut Tensor,
) -> Result<(), OpError> {
    let rows = x.elements() / columns;
    pack(exec, op, PackRows::pack_split_rows, PackRows { x, out: Target::Tensor(packed), rows, k: columns })
}

/// Launches a kernel that packs rows.
fn pack(
    exec: &mut Exec,
    op: &'static str,
    entry: Entry<PackRows<'static>>,
    arguments: PackRows<'_>,
) -> Result<(), OpError> {
    const WARPS: usize = 4;
    let groups = arguments.rows * arguments.k / DEPTH;
    if groups == 0 {
        return Ok(());
    }
    let launch = entry.launch(exec.gpu()?, op, arguments)?;
    // SAFETY: the op checked the shapes; a warp has a group of 128 columns, and the grid covers all groups.
    unsafe { launch.overlapped().run([groups.div_ceil(WARPS), 1, 1], 32 * WARPS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_memory_fits_a_hopper_block() {
        for (n, k) in [(1024, 4096), (8192, 1024), (4096, 8192), (2048, 4096), (256, 4096), (129_280, 4096)] {
            let plan = SkinnyPlan::new(n, k);
            for (operand, tokens) in [((32, 1), 32), ((32, 1), 16), ((32, 2), 32)] {
                let bytes = plan.shared(k, operand, tokens);
                assert!(bytes <= SHARED_BYTES || k > 4096, "{n} x {k}: {bytes} bytes for {operand:?}");
            }
        }
    }

    #[test]
    fn tiles_hold_their_tokens() {
        assert_eq!([1, 8, 9, 16, 17, 64].map(|m| tile(m, 3).1), [8, 8, 16, 16, 32, 32]);
        assert_eq!([1, 8, 9, 64].map(|m| tile(m, 2).1), [8, 8, 16, 16]);
    }
}
