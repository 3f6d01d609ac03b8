//! `routed_experts` at many tokens on Hopper (csrc/deepseek_v4_experts_wgmma.cu).

use super::activations::Scratch;
use crate::choice::{self, DenseGemm};
use crate::cuda::abi::{AddColumns, DownWgmma, Entry, GateUpWgmma, Map, PackAndGroup, PackFp8, Target};
use crate::limits::deepseek_v4::MAX_EXPERTS;
use crate::limits::deepseek_v4_experts_wgmma::{ADD_TOKENS, PACK_THREADS, SHARED_BYTES, THREADS};
use crate::limits::deepseek_v4_gemm::{DEPTH, GROUP_THREADS, MAX_CHOSEN};
use crate::ops::Matrix;
use crate::ops::deepseek_v4::{ExpertMath, Experts};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

const OP: &str = "routed_experts";
/// Tokens of the entries' tiles.
const TILES: [usize; 3] = [32, 64, 128];
const GATE_UP: [Entry<GateUpWgmma<'static>>; 3] =
    [GateUpWgmma::gate_up_wgmma_32, GateUpWgmma::gate_up_wgmma_64, GateUpWgmma::gate_up_wgmma_128];
const DOWN: [Entry<DownWgmma<'static>>; 3] =
    [DownWgmma::down_wgmma_32, DownWgmma::down_wgmma_64, DownWgmma::down_wgmma_128];
/// Rows of a box of weights.
const BOX_ROWS: usize = 64;
/// Largest k: a row's scales are in shared memory.
const MAX_DEPTH: usize = 4096;
/// Elements of a vector.
const VECTOR: usize = 8;
/// Columns of y that are added up while they are in the L2 cache.
const COLUMNS: usize = 1024;

/// Whether [`routed_experts`] takes these operands.
pub(super) fn takes(exec: &mut Exec, x: &Tensor, experts: &Experts, math: ExpertMath) -> Result<bool, OpError> {
    let ((tokens, hidden), width) = (x.rows_cols(), experts.width());
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    let fp4 = [&experts.gate, &experts.up, &experts.down].into_iter().all(|w| matches!(w, Matrix::Fp4 { .. }));
    let depth = |k: usize| k.is_multiple_of(2 * DEPTH) && k <= MAX_DEPTH;
    let whole = depth(hidden) && depth(width) && hidden.is_multiple_of(COLUMNS) && experts.count <= MAX_EXPERTS;
    Ok(hopper && fp4 && whole && math.quantize && x.dtype() == DType::Bf16 && tokens >= DenseGemm::MIN_TOKENS)
}

/// What bounds a pass.
struct Sizes {
    hidden: usize,
    width: usize,
    /// Experts of a token.
    k: usize,
}

impl Sizes {
    /// Bytes of the packed activations of `rows` rows of `columns`: codes, and scales.
    fn packed(rows: usize, columns: usize) -> (usize, usize) {
        (rows * columns, rows * columns / DEPTH * 4)
    }

    /// Tokens of a pass, whose activations fit the workspace.
    fn tokens(&self) -> usize {
        let packed = |columns: usize| columns + columns / DEPTH * 4;
        let pair = (2 * self.width).max(2 * COLUMNS) + packed(self.width) + 16;
        (WORKSPACE_BYTES - (1 << 20)) / (packed(self.hidden) + self.k * pair)
    }
}

/// The op on checked operands that [`takes`] accepts.
pub(super) fn routed_experts(
    exec: &mut Exec,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    (experts, first): (&Experts, usize),
    math: ExpertMath,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, hidden), k) = (x.rows_cols(), chosen.rows_cols().1);
    if k > MAX_CHOSEN {
        return Err(OpError { op: OP, message: format!("{k} experts of a token: the GPU kernel takes {MAX_CHOSEN}") });
    }
    let most = Sizes { hidden, width: experts.width(), k }.tokens();
    // Passes of about the same size.
    let each = tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1);
    for from in (0..tokens).step_by(each) {
        let part = from..(from + each).min(tokens);
        pass(exec, x, (chosen, weights), (experts, first), math, part, out)?;
    }
    Ok(())
}

/// Some tokens.
fn pass(
    exec: &mut Exec,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    (experts, first): (&Experts, usize),
    math: ExpertMath,
    tokens: Range<usize>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (hidden, width, k, count) = (x.rows_cols().1, experts.width(), chosen.rows_cols().1, tokens.len());
    let pairs = count * k;
    let place = TILES.iter().position(|tile| pairs <= tile * experts.count).unwrap_or(TILES.len() - 1);
    let mut scratch = Scratch::new(exec)?;
    let mut take = |bytes: usize| scratch.take(OP, bytes);
    // An expert's tiles are multiples of 16 pairs, but for the last.
    let most = experts.count.min(pairs) + pairs / 16;
    let (list, tiles) = (take(pairs * 4)?, take((1 + 3 * most) * 4)?);
    let ((codes, scales), (h_codes, h_scales)) = (Sizes::packed(count, hidden), Sizes::packed(pairs, width));
    let (x_codes, x_scales) = (take(codes)?, take(scales)?);
    let (h_codes, h_scales) = (take(h_codes)?, take(h_scales)?);
    // h, and when it is packed, columns of y.
    let buffer = take(pairs * (2 * width).max(2 * COLUMNS))?;
    let row = |tensor: &Tensor, width: usize| tensor.device() + (tokens.start * width * tensor.dtype().size()) as u64;
    let chosen = row(chosen, k);

    let vectors = count * hidden / VECTOR;
    let arguments = PackAndGroup {
        x: row(x, hidden),
        codes: Target::Scratch(x_codes),
        scales: x_scales,
        vectors,
        chosen,
        pairs: list,
        tiles,
        count: pairs,
        first,
        experts: experts.count,
        tokens: TILES[place],
    };
    let launch = PackAndGroup::pack_and_group.launch(exec.gpu()?, OP, arguments)?.overlapped();
    // SAFETY: the op checked the shapes; a thread a vector, and a block for the list, whose buffers have place for all pairs and tiles.
    unsafe { launch.run([1 + vectors.div_ceil(GROUP_THREADS), 1, 1], GROUP_THREADS)? };
    let grid = [exec.gpu()?.multiprocessors(), 1, 1];
    let ((gate, gate_scales), (up, up_scales)) = (experts.gate.device(), experts.up.device());
    let arguments = GateUpWgmma {
        gate: Map::narrow_codes(OP, gate, BOX_ROWS)?,
        up: Map::narrow_codes(OP, up, BOX_ROWS)?,
        x: x_codes,
        x_scales,
        gate_scales,
        up_scales,
        tiles,
        pairs: list,
        weights: row(weights, k),
        out: buffer,
        experts_of_token: k,
        width,
        k: hidden,
        limit: math.limit,
    };
    let launch = GATE_UP[place].launch(exec.gpu()?, OP, arguments)?.overlapped().shared(SHARED_BYTES);
    // SAFETY: persistent blocks over all tiles of pairs and of rows; `buffer` has a row for each pair.
    unsafe { launch.run(grid, THREADS)? };
    let vectors = pairs * width / VECTOR;
    let arguments = PackFp8 { x: buffer, codes: Target::Scratch(h_codes), scales: h_scales, vectors };
    let launch = PackFp8::pack_fp8.launch(exec.gpu()?, OP, arguments)?.overlapped();
    // SAFETY: a thread a vector.
    unsafe { launch.run([vectors.div_ceil(PACK_THREADS), 1, 1], PACK_THREADS)? };
    for first_column in (0..hidden).step_by(COLUMNS) {
        let (w, scales) = experts.down.device();
        let arguments = DownWgmma {
            w: Map::narrow_codes(OP, w, BOX_ROWS)?,
            h: h_codes,
            h_scales,
            scales,
            tiles,
            pairs: list,
            out: buffer,
            hidden,
            k: width,
            first: first_column,
            columns: COLUMNS,
        };
        let launch = DOWN[place].launch(exec.gpu()?, OP, arguments)?.overlapped().shared(SHARED_BYTES);
        // SAFETY: as above, of `COLUMNS` columns.
        unsafe { launch.run(grid, THREADS)? };
        let arguments = AddColumns {
            y: buffer,
            chosen,
            out: Target::Scratch(row(out, hidden)),
            tokens: count,
            hidden,
            k,
            first,
            experts: experts.count,
            first_column,
            columns: COLUMNS,
        };
        let launch = AddColumns::add_columns.launch(exec.gpu()?, OP, arguments)?.writes(out).overlapped();
        // SAFETY: a thread a vector of each token.
        unsafe { launch.run([count.div_ceil(ADD_TOKENS), 1, 1], ADD_TOKENS * COLUMNS / VECTOR)? };
    }
    Ok(())
}
