//! `routed_experts` at many tokens on Hopper (csrc/experts/wgmma.cu).

use super::large_gemm::packed_bytes;
use crate::choice::{self, DenseGemm};
use crate::cuda::abi::{AddColumns, DownWgmma, Entry, GateUpWgmma, GroupPlaces, Map, PackPlaces, PackTokens, Target};
use crate::cuda::scratch::Scratch;
use crate::limits::deepseek_v4_experts_wgmma::{
    ADD_TOKENS, BLOCKS, BOX_ROWS, BOX_TOKENS, FEW_THREADS, LIST_ALIGN, MAX_DEPTH, PACK_THREADS, SHARED_BYTES, THREADS,
};
use crate::limits::deepseek_v4_gemm::DEPTH;
use crate::limits::moe::{GROUP_THREADS, MAX_CHOSEN, MAX_EXPERTS};
use crate::ops::Matrix;
use crate::ops::deepseek_v4::{ExpertMath, Experts};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

const OP: &str = "routed_experts";
/// Tokens of the entries' tiles.
const TILES: [usize; 3] = [48, 96, 128];
const GATE_UP: [Entry<GateUpWgmma<'static>>; 3] =
    [GateUpWgmma::gate_up_wgmma_48, GateUpWgmma::gate_up_wgmma_96, GateUpWgmma::gate_up_wgmma_128];
const DOWN: [Entry<DownWgmma<'static>>; 3] =
    [DownWgmma::down_wgmma_48, DownWgmma::down_wgmma_96, DownWgmma::down_wgmma_128];
/// Elements of a vector in bf16.
const VECTOR: usize = 8;
/// Maximum bytes of the lists for each pair: its number, its place, and a sixteenth of a tile.
const LIST_BYTES: usize = 16;
/// Bytes of the workspace that remain for alignment.
const SLACK_BYTES: usize = 1 << 20;
/// Blocks that group the pairs.
const GROUP_BLOCKS: usize = 16;
/// Columns of y that a block adds up.
const COLUMNS: usize = 512;
/// Columns of y per launch if all columns take more than [`CACHED_BYTES`].
const PART_COLUMNS: usize = 2 * COLUMNS;
/// Bytes of y that mostly stay in the L2 cache until they are added up.
const CACHED_BYTES: usize = 52 << 20;

/// True if [`routed_experts`] takes these operands: it packs `x`, which rounds it.
pub(crate) fn packs_experts(exec: &mut Exec, x: &Tensor, experts: &Experts, math: ExpertMath) -> Result<bool, OpError> {
    let ((tokens, hidden), width) = (x.rows_cols(), experts.width());
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    let fp4 = [&experts.gate, &experts.up, &experts.down].into_iter().all(|w| matches!(w, Matrix::Fp4 { .. }));
    let depth = |k: usize| k.is_multiple_of(2 * DEPTH) && k <= MAX_DEPTH;
    let whole = depth(hidden) && depth(width) && hidden.is_multiple_of(COLUMNS) && experts.count <= MAX_EXPERTS;
    Ok(hopper && fp4 && whole && math.quantize && x.dtype() == DType::Bf16 && tokens >= DenseGemm::MIN_TOKENS)
}

/// Sizes that the memory of a pass depends on.
#[derive(Clone, Copy)]
struct Sizes {
    hidden: usize,
    width: usize,
    /// Experts of a token.
    k: usize,
}

impl Sizes {
    /// Bytes of `rows` rows of packed activations of `columns` columns: codes, then scales.
    fn packed(rows: usize, columns: usize) -> (usize, usize) {
        (rows * columns, rows * columns / DEPTH * 4)
    }

    /// Number of places of `pairs` pairs in the lists of `experts` experts, including unused ones at the ends of lists.
    /// Scales of activations have rows of this length: whole vectors of 16 bytes, plus a few that the last tile may
    /// read.
    fn places(pairs: usize, experts: usize) -> usize {
        (pairs + experts * (LIST_ALIGN - 1)).next_multiple_of(LIST_ALIGN) + BOX_TOKENS
    }

    /// Bytes of a place: x or, later, h in FP8, and h in bf16 or, later, some columns of y.
    fn place(&self) -> usize {
        packed_bytes(self.hidden.max(self.width)) + 2 * self.width.max(PART_COLUMNS)
    }

    /// Maximum number of tokens of a pass over `experts` experts whose activations fit the workspace.
    fn tokens(&self, experts: usize) -> usize {
        let unused = Self::places(0, experts) * self.place() + SLACK_BYTES + experts * 12;
        (WORKSPACE_BYTES - unused) / (self.k * (self.place() + LIST_BYTES))
    }

    /// Columns of y of `pairs` pairs that one launch computes.
    fn columns(&self, pairs: usize) -> usize {
        if pairs * self.hidden * 2 <= CACHED_BYTES { self.hidden } else { PART_COLUMNS.min(self.hidden) }
    }
}

/// The op on checked operands that [`packs_experts`] accepts.
pub(super) fn routed_experts(
    exec: &mut Exec,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    (experts, first): (&Experts, usize),
    math: ExpertMath,
    (shared, out): (Option<&Tensor>, &mut Tensor),
) -> Result<(), OpError> {
    let ((tokens, hidden), k) = (x.rows_cols(), chosen.rows_cols().1);
    if k > MAX_CHOSEN {
        return Err(OpError { op: OP, message: format!("{k} experts of a token: the GPU kernel takes {MAX_CHOSEN}") });
    }
    let most = Sizes { hidden, width: experts.width(), k }.tokens(experts.count);
    // Passes of about the same size.
    let each = tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1);
    for from in (0..tokens).step_by(each) {
        let part = from..(from + each).min(tokens);
        pass(exec, x, (chosen, weights), (experts, first), math, part, (shared, out))?;
    }
    Ok(())
}

/// Operands shared by the launches of a pass. Addresses are those of the rows of the pass.
struct Pass<'a> {
    experts: &'a Experts,
    first: usize,
    tokens: usize,
    sizes: Sizes,
    /// `[tokens, k]` u32.
    chosen: u64,
    /// Place of the tile in [`TILES`].
    tile: usize,
    buffers: Buffers,
}

/// Device addresses of the scratch memory of a pass.
struct Buffers {
    /// Pairs by expert.
    pairs: u64,
    /// Place of each pair.
    places: u64,
    /// Number of tiles, then three words of each.
    tiles: u64,
    /// Codes and scales of x, and when gate and up are computed, of h.
    packed: (u64, u64),
    /// h in bf16; after it is packed, some columns of y.
    values: u64,
}

impl Buffers {
    /// `columns`: of y in `values`.
    fn new(
        scratch: &mut Scratch,
        tokens: usize,
        experts: usize,
        Sizes { hidden, width, k }: Sizes,
        columns: usize,
    ) -> Result<Self, OpError> {
        let mut take = |bytes: usize| scratch.take(OP, bytes);
        let pairs = tokens * k;
        let places = Sizes::places(pairs, experts);
        // An expert's tiles are multiples of 16 pairs, except the last.
        let most = experts.min(pairs) + pairs / 16;
        let (list, of_pairs, tiles) = (take(places * 4)?, take(pairs * 4)?, take((1 + 3 * most) * 4)?);
        let (codes, scales) = Sizes::packed(places, hidden.max(width));
        let packed = (take(codes)?, take(scales)?);
        Ok(Self { pairs: list, places: of_pairs, tiles, packed, values: take(places * 2 * width.max(columns))? })
    }
}

/// Index into [`TILES`] of the tile for `pairs` pairs of `experts` experts: the smallest that holds 1.5 times the
/// average number of pairs per expert. Few experts then have a second tile, whose weights would be fetched and widened
/// again.
fn tile(pairs: usize, experts: usize) -> usize {
    TILES.iter().position(|tile| 3 * pairs <= 2 * tile * experts).unwrap_or(TILES.len() - 1)
}

/// Address of row `row` of a tensor of `width` columns.
fn row_of(tensor: &Tensor, width: usize, row: usize) -> u64 {
    tensor.device() + (row * width * tensor.dtype().size()) as u64
}

/// The op for the tokens with these numbers.
fn pass(
    exec: &mut Exec,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    (experts, first): (&Experts, usize),
    math: ExpertMath,
    tokens: Range<usize>,
    (shared, out): (Option<&Tensor>, &mut Tensor),
) -> Result<(), OpError> {
    let (hidden, width, k) = (x.rows_cols().1, experts.width(), chosen.rows_cols().1);
    let (pairs, sizes) = (tokens.len() * k, Sizes { hidden, width, k });
    let columns = sizes.columns(pairs);
    let buffers = Buffers::new(&mut Scratch::new(exec)?, tokens.len(), experts.count, sizes, columns)?;
    let chosen = row_of(chosen, k, tokens.start);
    let pass = Pass { experts, first, tokens: tokens.len(), sizes, chosen, tile: tile(pairs, experts.count), buffers };
    pass.group(exec)?;
    pass.pack_x(exec, row_of(x, hidden, tokens.start))?;
    // Until here the shared expert may run concurrently. Its kernels do not fit a multiprocessor together with a block
    // of the GEMMs.
    exec.join_side_streams()?;
    pass.gate_up(exec, row_of(weights, k, tokens.start), math.limit)?;
    pass.pack_h(exec)?;
    for first_column in (0..hidden).step_by(columns) {
        let columns = columns.min(hidden - first_column);
        pass.down(exec, first_column, columns)?;
        pass.add(exec, (first_column, columns), tokens.start, shared, out)?;
    }
    Ok(())
}

impl Pass<'_> {
    /// Threads of a block that multiplies.
    fn threads(&self) -> usize {
        if self.tile == 0 { FEW_THREADS } else { THREADS }
    }

    /// Places in the lists.
    fn places(&self) -> usize {
        Sizes::places(self.tokens * self.sizes.k, self.experts.count)
    }

    /// Blocks of a GEMM: whole clusters.
    fn grid(&self, exec: &mut Exec) -> Result<[usize; 3], OpError> {
        Ok([exec.gpu()?.multiprocessors() / BLOCKS * BLOCKS, 1, 1])
    }

    /// Lists the pairs of each expert and their tiles.
    fn group(&self, exec: &mut Exec) -> Result<(), OpError> {
        let arguments = GroupPlaces {
            chosen: self.chosen,
            pairs: Target::Scratch(self.buffers.pairs),
            places: self.buffers.places,
            tiles: self.buffers.tiles,
            count: self.tokens * self.sizes.k,
            first: self.first,
            experts: self.experts.count,
            tokens: TILES[self.tile],
        };
        let launch = GroupPlaces::group_places.launch(exec.gpu()?, OP, arguments)?.overlapped();
        // SAFETY: the op checked the shapes; the buffers have place for all pairs and tiles.
        unsafe { launch.run([GROUP_BLOCKS, 1, 1], GROUP_THREADS) }
    }

    /// Packs x, a row for each place.
    fn pack_x(&self, exec: &mut Exec, x: u64) -> Result<(), OpError> {
        let vectors = self.tokens * self.sizes.hidden / VECTOR;
        let (codes, scales) = self.buffers.packed;
        let arguments = PackTokens {
            x,
            chosen: self.chosen,
            places: self.buffers.places,
            codes: Target::Scratch(codes),
            scales,
            vectors,
            k: self.sizes.hidden,
            pitch: self.places(),
            experts_of_token: self.sizes.k,
            first: self.first,
            experts: self.experts.count,
        };
        let launch = PackTokens::pack_tokens.launch(exec.gpu()?, OP, arguments)?.overlapped();
        // SAFETY: a thread has a vector of x; the buffers have a row for each place.
        unsafe { launch.run([vectors.div_ceil(PACK_THREADS), 1, 1], PACK_THREADS) }
    }

    /// h of every pair, in the order of the list.
    fn gate_up(&self, exec: &mut Exec, weights: u64, limit: f32) -> Result<(), OpError> {
        let ((gate, gate_scales), (up, up_scales)) = (self.experts.gate.device(), self.experts.up.device());
        let (codes, scales) = self.buffers.packed;
        let arguments = GateUpWgmma {
            gate: Map::narrow_codes(OP, gate, BOX_ROWS)?,
            up: Map::narrow_codes(OP, up, BOX_ROWS)?,
            x: Map::scratch_codes(OP, codes, (self.places(), self.sizes.hidden), BOX_TOKENS)?,
            x_scales: scales,
            gate_scales,
            up_scales,
            tiles: self.buffers.tiles,
            pairs: self.buffers.pairs,
            weights,
            out: self.buffers.values,
            width: self.sizes.width,
            k: self.sizes.hidden,
            pitch: self.places(),
            limit,
        };
        let grid = self.grid(exec)?;
        let launch = GATE_UP[self.tile].launch(exec.gpu()?, OP, arguments)?.cluster(BLOCKS).overlapped();
        // SAFETY: persistent blocks over all tiles of pairs and of rows; the buffer has a row of h for each place.
        unsafe { launch.shared(SHARED_BYTES).run(grid, self.threads()) }
    }

    /// Packs h in the memory of x.
    fn pack_h(&self, exec: &mut Exec) -> Result<(), OpError> {
        let vectors = self.places() * self.sizes.width / VECTOR;
        let (codes, scales) = self.buffers.packed;
        let arguments = PackPlaces {
            h: self.buffers.values,
            tiles: self.buffers.tiles,
            codes: Target::Scratch(codes),
            scales,
            k: self.sizes.width,
            pitch: self.places(),
        };
        let launch = PackPlaces::pack_places.launch(exec.gpu()?, OP, arguments)?.overlapped();
        // SAFETY: a thread has a vector of h; the grid covers all places.
        unsafe { launch.run([vectors.div_ceil(PACK_THREADS), 1, 1], PACK_THREADS) }
    }

    /// `columns` columns of y of every pair, from `first_column` on.
    fn down(&self, exec: &mut Exec, first_column: usize, columns: usize) -> Result<(), OpError> {
        let ((w, scales), (codes, h_scales)) = (self.experts.down.device(), self.buffers.packed);
        let arguments = DownWgmma {
            w: Map::narrow_codes(OP, w, BOX_ROWS)?,
            h: Map::scratch_codes(OP, codes, (self.places(), self.sizes.width), BOX_TOKENS)?,
            h_scales,
            scales,
            tiles: self.buffers.tiles,
            pairs: self.buffers.pairs,
            out: self.buffers.values,
            hidden: self.sizes.hidden,
            k: self.sizes.width,
            pitch: self.places(),
            first: first_column,
            columns,
        };
        let grid = self.grid(exec)?;
        let launch = DOWN[self.tile].launch(exec.gpu()?, OP, arguments)?.cluster(BLOCKS).overlapped();
        // SAFETY: persistent blocks over all tiles of pairs and of rows; the buffer has `columns` columns of y for each
        // pair.
        unsafe { launch.shared(SHARED_BYTES).run(grid, self.threads()) }
    }

    /// Adds up these columns of y and of `shared`, for the rows of `out` from `first_row` on.
    fn add(
        &self,
        exec: &mut Exec,
        (first_column, columns): (usize, usize),
        first_row: usize,
        shared: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result<(), OpError> {
        let arguments = AddColumns {
            y: self.buffers.values,
            chosen: self.chosen,
            shared: shared.map_or(0, |shared| row_of(shared, self.sizes.hidden, first_row)),
            out: Target::Scratch(row_of(out, self.sizes.hidden, first_row)),
            tokens: self.tokens,
            hidden: self.sizes.hidden,
            k: self.sizes.k,
            first: self.first,
            experts: self.experts.count,
            first_column,
            columns,
        };
        let launch = AddColumns::add_columns.launch(exec.gpu()?, OP, arguments)?.writes(out).overlapped();
        let grid = [self.tokens.div_ceil(ADD_TOKENS), columns / COLUMNS, 1];
        // SAFETY: a thread has a vector of a token; the grid covers all tokens of the pass, and these columns.
        unsafe { launch.run(grid, ADD_TOKENS * COLUMNS / VECTOR) }
    }
}
