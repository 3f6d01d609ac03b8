//! `moe` at few tokens on Hopper (csrc/deepseek_v4_experts_skinny.cu).

use super::activations::Scratch;
use super::skinny::SkinnyPlan;
use crate::choice::{self, DenseGemm};
use crate::cuda::abi::{AddExperts, GroupPairs, SkinnyDown, SkinnyGateUp, Target};
use crate::limits::deepseek_v4::MAX_EXPERTS;
use crate::limits::deepseek_v4_gemm::{DEPTH, GROUP_THREADS, MAX_CHOSEN};
use crate::ops::deepseek_v4::{Activation, ExpertMath, Experts, Moe};
use crate::ops::{BlockScales, Matrix};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Elements of the gate weights of all experts, below which they stay in the L2 cache, so that these kernels serve any number of tokens.
const FEW_ELEMENTS: usize = 4 << 20;
/// Largest hidden size: a block has the tokens of all of its columns in shared memory.
const MAX_HIDDEN: usize = 8192;
/// Pairs of a tile.
const TILE: usize = 8;
/// Most pairs for which there is a block each; more are listed by expert first.
const UNLISTED: usize = 64;
/// Rows of a tile of weights.
const ROWS: usize = 64;
/// Largest width at which gate and up of one token are split between four warpgroups: there are few tiles.
const SPLIT_WIDTH: usize = 512;
/// Threads of a warpgroup.
const WARPGROUP: usize = 128;
/// Threads of a block that adds up experts, two columns each.
const ADD_THREADS: usize = 128;

/// Whether the experts are in the formats of the official checkpoints: the routed ones in FP4, the shared one in FP8 with E8M0 scales.
fn official(experts: &Moe<'_>) -> bool {
    let all =
        |experts: &Experts, is: fn(&Matrix) -> bool| [&experts.gate, &experts.up, &experts.down].into_iter().all(is);
    let fp8 = |w: &Matrix| matches!(w, Matrix::Fp8 { scale: BlockScales::E8m0(_), .. });
    all(experts.routed, |w| matches!(w, Matrix::Fp4 { .. })) && experts.shared.is_none_or(|shared| all(shared, fp8))
}

/// Whether [`moe`] takes these operands, of tokens with `k` experts each.
pub(crate) fn fuses_experts(
    exec: &mut Exec,
    x: Activation<'_>,
    (experts, k): (&Moe<'_>, usize),
    math: ExpertMath,
) -> Result<bool, OpError> {
    let ((tokens, hidden), width) = (x.values.rows_cols(), experts.routed.width());
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    let whole = hidden.is_multiple_of(DEPTH) && width.is_multiple_of(DEPTH) && hidden <= MAX_HIDDEN;
    let few = tokens < DenseGemm::MIN_TOKENS || experts.routed.count * width * hidden < FEW_ELEMENTS;
    let packed = x.packed.is_some() && x.values.dtype() == DType::Bf16 && math.quantize;
    let results = tokens * (k + 1) * (width + hidden) * DType::Bf16.size();
    let fits = experts.routed.count <= MAX_EXPERTS && results <= WORKSPACE_BYTES / 2;
    Ok(hopper && whole && few && packed && fits && official(experts))
}

/// What the launches of a call have in common.
struct Call<'a> {
    op: &'static str,
    experts: &'a Moe<'a>,
    /// `[tokens, k]` u32.
    chosen: &'a Tensor,
    tokens: usize,
    hidden: usize,
    width: usize,
    /// Experts of a token.
    k: usize,
    /// Blocks for all tiles of pairs, those of the shared expert behind the others.
    tiles: usize,
}

/// Device addresses of the scratch memory of a call.
struct Buffers {
    /// Number of tiles, then three words of each; 0 without a list.
    tiles: u64,
    /// Pairs by expert; 0 without a list.
    pairs: u64,
    /// `[pairs, width]` bf16.
    h: u64,
    /// `[pairs, hidden]` bf16.
    y: u64,
}

/// `moe` on checked operands that [`fuses_experts`] accepts.
pub(crate) fn moe(
    exec: &mut Exec,
    op: &'static str,
    x: Activation<'_>,
    (chosen, weights): (&Tensor, &Tensor),
    experts: &Moe<'_>,
    math: ExpertMath,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, hidden), k, width) = (x.values.rows_cols(), chosen.rows_cols().1, experts.routed.width());
    let Some(packed) = x.packed.filter(|_| exec.device() == Device::Cuda && tokens > 0) else { return Ok(()) };
    if k > MAX_CHOSEN {
        return Err(OpError { op, message: format!("{k} experts of a token: the GPU kernel takes {MAX_CHOSEN}") });
    }
    let (count, all) = (tokens * k, tokens * (k + 1));
    let listed = count > UNLISTED;
    let most = if listed { experts.routed.count.min(count) + count / TILE } else { count };
    let mut scratch = Scratch::new(exec)?;
    let mut list = |bytes: usize| if listed { scratch.take(op, bytes) } else { Ok(0) };
    let (pairs, tiles) = (list(count * 4)?, list((1 + 3 * most) * 4)?);
    let buffers =
        Buffers { tiles, pairs, h: scratch.take(op, all * width * 2)?, y: scratch.take(op, all * hidden * 2)? };
    let tiles = most + if experts.shared.is_some() { tokens.div_ceil(TILE) } else { 0 };
    let call = Call { op, experts, chosen, tokens, hidden, width, k, tiles };
    if listed {
        call.group(exec, &buffers)?;
    }
    call.gate_up(exec, (packed, weights), math.limit, &buffers)?;
    call.down(exec, &buffers)?;
    call.add(exec, &buffers, out)
}

impl Call<'_> {
    /// Lists the pairs of each expert, and their tiles.
    fn group(&self, exec: &mut Exec, buffers: &Buffers) -> Result<(), OpError> {
        let arguments = GroupPairs {
            chosen: self.chosen.device(),
            pairs: Target::Scratch(buffers.pairs),
            tiles: buffers.tiles,
            count: self.tokens * self.k,
            first: self.experts.first,
            experts: self.experts.routed.count,
            tokens: TILE,
        };
        let launch = GroupPairs::group_pairs.launch(exec.gpu()?, self.op, arguments)?;
        // SAFETY: one block; the buffers have place for all pairs and tiles.
        unsafe { launch.run([1, 1, 1], GROUP_THREADS) }
    }

    /// `h` of every pair, from the packed tokens.
    fn gate_up(
        &self,
        exec: &mut Exec,
        (packed, weights): (&Tensor, &Tensor),
        limit: f32,
        &Buffers { tiles, pairs, h, .. }: &Buffers,
    ) -> Result<(), OpError> {
        let &Self { op, experts: &Moe { routed, first, .. }, chosen, tokens, hidden, width, k, .. } = self;
        let ((gate, gate_scales), (up, up_scales)) = (routed.gate.device(), routed.up.device());
        let (shared_gate, shared_gate_scales) = self.of_shared(|e| &e.gate);
        let (shared_up, shared_up_scales) = self.of_shared(|e| &e.up);
        // Four segments of k either way, with the same bits: more warpgroups for a tile where there are few tiles.
        let few_tiles = tokens == 1 && width <= SPLIT_WIDTH && hidden == 32 * DEPTH;
        let plan = SkinnyPlan { splits: if few_tiles { 4 } else { 2 }, blocks: 1 };
        let arguments = SkinnyGateUp {
            x: packed,
            gate,
            gate_scales,
            up,
            up_scales,
            shared_gate,
            shared_gate_scales,
            shared_up,
            shared_up_scales,
            chosen,
            weights,
            tiles,
            pairs,
            h,
            tokens,
            experts_of_token: k,
            first,
            experts: routed.count,
            width,
            k: hidden,
            splits: plan.splits,
            limit,
        };
        let launch = SkinnyGateUp::experts_gate_up_8.launch(exec.gpu()?, op, arguments)?.overlapped();
        let launch = launch.shared(plan.shared(hidden, 1, (TILE, 1), TILE));
        // SAFETY: the op checked the shapes; the grid covers every column of `h`, and every tile of pairs.
        unsafe { launch.run([width.div_ceil(ROWS / 2), self.tiles, 1], plan.splits * WARPGROUP) }
    }

    /// `y` of every pair, from `h`.
    fn down(&self, exec: &mut Exec, &Buffers { tiles, pairs, h, y }: &Buffers) -> Result<(), OpError> {
        let &Self { op, experts: &Moe { routed, first, .. }, chosen, tokens, hidden, width, k, .. } = self;
        let ((w, scales), (shared_w, shared_scales)) = (routed.down.device(), self.of_shared(|e| &e.down));
        let rows = if hidden.is_multiple_of(2 * ROWS) { 2 } else { 1 };
        let plan = SkinnyPlan { splits: 1, blocks: 1 };
        let arguments = SkinnyDown {
            h,
            w,
            scales,
            shared_w,
            shared_scales,
            chosen,
            tiles,
            pairs,
            y,
            tokens,
            experts_of_token: k,
            first,
            experts: routed.count,
            hidden,
            k: width,
            splits: plan.splits,
        };
        let launch = SkinnyDown::experts_down_8.launch(exec.gpu()?, op, arguments)?.overlapped();
        let launch = launch.shared(plan.shared(width, rows, (TILE, 1), TILE));
        // SAFETY: the op checked the shapes; the grid covers every column of `y`, and every tile of pairs.
        unsafe { launch.run([hidden.div_ceil(ROWS * rows), self.tiles, 1], rows * WARPGROUP) }
    }

    /// The sums of the tokens' `y`.
    fn add(&self, exec: &mut Exec, buffers: &Buffers, out: &mut Tensor) -> Result<(), OpError> {
        let &Self { op, experts: &Moe { routed, first, shared }, chosen, tokens, hidden, k, .. } = self;
        let arguments = AddExperts {
            y: buffers.y,
            chosen,
            out: out.device(),
            tokens,
            hidden,
            k,
            first,
            experts: routed.count,
            shared: usize::from(shared.is_some()),
            to_f32: usize::from(out.dtype() == DType::F32),
        };
        let launch = AddExperts::experts_add.launch(exec.gpu()?, op, arguments)?.writes(out).overlapped();
        // SAFETY: a thread has two columns of a token; the grid covers all of them.
        unsafe { launch.run([tokens, hidden.div_ceil(2 * ADD_THREADS), 1], ADD_THREADS) }
    }

    /// Device addresses of codes and scales of a matrix of the shared expert; 0 without it.
    fn of_shared(&self, matrix: fn(&Experts) -> &Matrix) -> (u64, u64) {
        let addresses = |w: &Matrix| {
            let (codes, scales) = w.device();
            (codes.device(), scales)
        };
        self.experts.shared.map_or((0, 0), |shared| addresses(matrix(shared)))
    }
}
