//! `moe` at few tokens on Hopper (csrc/experts/skinny.cu).

use crate::choice::{self, DenseGemm};
use crate::cuda::abi::{AddExperts, GroupPairs, Map, SkinnyDown, SkinnyGateUp, Target};
use crate::cuda::scratch::Scratch;
use crate::limits::deepseek_v4_experts_skinny::{GROUPS, PAIRS, STAGE_BYTES, STAGES, THREADS, UNLISTED};
use crate::limits::deepseek_v4_gemm::{DEPTH, ROWS};
use crate::limits::moe::{GROUP_THREADS, MAX_CHOSEN, MAX_EXPERTS};
use crate::ops::deepseek_v4::{Activation, ExpertMath, Experts, Moe};
use crate::ops::{BlockScales, Matrix};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Number of elements of the gate weights of all experts below which they stay in the L2 cache, so that these kernels
/// serve any number of tokens.
const FEW_ELEMENTS: usize = 4 << 20;
/// Largest hidden size and width of experts: a block has operands of all of its columns in shared memory.
const MAX_HIDDEN: usize = 8192;
const MAX_WIDTH: usize = 2048;
/// Bytes of a step of [`DEPTH`] columns of a tile's operand in shared memory, with their scales.
const STEP_BYTES: usize = PAIRS * (DEPTH + size_of::<f32>());
/// Bytes of a block's weights in shared memory, and of their scales.
const RINGS: usize = GROUPS * STAGES * (STAGE_BYTES + ROWS * size_of::<u32>());
/// Rows of a box of weights.
const BOX_ROWS: usize = ROWS / 2;
/// Threads of a block that adds up experts, two columns each.
const ADD_THREADS: usize = 128;

/// True if the experts are in the formats of the official checkpoints: routed ones in FP4, the shared one in FP8 with
/// E8M0 scales.
fn has_official_formats(experts: &Moe<'_>) -> bool {
    let all =
        |experts: &Experts, is: fn(&Matrix) -> bool| [&experts.gate, &experts.up, &experts.down].into_iter().all(is);
    let fp8 = |w: &Matrix| matches!(w, Matrix::Fp8 { scale: BlockScales::E8m0(_), .. });
    all(experts.routed, |w| matches!(w, Matrix::Fp4 { .. })) && experts.shared.is_none_or(|shared| all(shared, fp8))
}

/// True if [`moe`] takes these operands, for tokens with `k` experts each.
pub(crate) fn fuses_experts(
    exec: &mut Exec,
    x: Activation<'_>,
    (experts, k): (&Moe<'_>, usize),
    math: ExpertMath,
) -> Result<bool, OpError> {
    let ((tokens, hidden), width) = (x.values.rows_cols(), experts.routed.width());
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    let whole = hidden.is_multiple_of(DEPTH) && width.is_multiple_of(DEPTH);
    let small = hidden <= MAX_HIDDEN && width <= MAX_WIDTH;
    let few = tokens < DenseGemm::MIN_TOKENS || experts.routed.count * width * hidden < FEW_ELEMENTS;
    let packed = x.packed.is_some() && x.values.dtype() == DType::Bf16 && math.quantize;
    let results = tokens * (k + 1) * (width + hidden) * DType::Bf16.size();
    let fits = experts.routed.count <= MAX_EXPERTS && results <= WORKSPACE_BYTES / 2;
    Ok(hopper && whole && small && few && packed && fits && has_official_formats(experts))
}

/// Operands shared by the launches of a call.
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
    let most = experts.routed.count.min(count) + count / PAIRS;
    let mut scratch = Scratch::new(exec)?;
    let mut list = |bytes: usize| if listed { scratch.take(op, bytes) } else { Ok(0) };
    let (pairs, tiles) = (list(count * 4)?, list((1 + 3 * most) * 4)?);
    let buffers =
        Buffers { tiles, pairs, h: scratch.take(op, all * width * 2)?, y: scratch.take(op, all * hidden * 2)? };
    let call = Call { op, experts, chosen, tokens, hidden, width, k };
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
            tokens: PAIRS,
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
        let &Self { op, experts: &Moe { routed, first, shared }, chosen, tokens, hidden, width, k } = self;
        let ((gate, gate_scales), (up, up_scales)) = (routed.gate.device(), routed.up.device());
        let (shared_gate, shared_gate_scales) = self.shared_matrix(gate, |e| &e.gate);
        let (shared_up, shared_up_scales) = self.shared_matrix(up, |e| &e.up);
        let map = |w| Map::narrow_codes(op, w, BOX_ROWS);
        let arguments = SkinnyGateUp {
            gate: map(gate)?,
            up: map(up)?,
            shared_gate: map(shared_gate)?,
            shared_up: map(shared_up)?,
            x: packed,
            gate_scales,
            up_scales,
            shared_gate_scales,
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
            has_shared: usize::from(shared.is_some()),
            width,
            k: hidden,
            limit,
        };
        let grid = [exec.gpu()?.multiprocessors(), 1, 1];
        // Operands of a warpgroup's quarter of the columns, and the sums of two units.
        let bytes =
            RINGS + GROUPS * ((hidden / DEPTH).div_ceil(GROUPS) * STEP_BYTES + 2 * PAIRS * ROWS * size_of::<f32>());
        let launch = SkinnyGateUp::experts_gate_up.launch(exec.gpu()?, op, arguments)?.overlapped_late_release();
        // SAFETY: the op checked the shapes; the blocks share all columns of `h` of all tiles of pairs.
        unsafe { launch.shared(bytes).run(grid, THREADS) }
    }

    /// `y` of every pair, from `h`.
    fn down(&self, exec: &mut Exec, &Buffers { tiles, pairs, h, y }: &Buffers) -> Result<(), OpError> {
        let &Self { op, experts: &Moe { routed, first, shared }, chosen, tokens, hidden, width, k } = self;
        let (w, scales) = routed.down.device();
        let (shared_w, shared_scales) = self.shared_matrix(w, |e| &e.down);
        let arguments = SkinnyDown {
            w: Map::narrow_codes(op, w, BOX_ROWS)?,
            shared_w: Map::narrow_codes(op, shared_w, BOX_ROWS)?,
            h,
            scales,
            shared_scales,
            chosen,
            tiles,
            pairs,
            y,
            tokens,
            experts_of_token: k,
            first,
            experts: routed.count,
            has_shared: usize::from(shared.is_some()),
            hidden,
            k: width,
        };
        let grid = [exec.gpu()?.multiprocessors(), 1, 1];
        let launch = SkinnyDown::experts_down.launch(exec.gpu()?, op, arguments)?.early(chosen).overlapped();
        // SAFETY: the op checked the shapes; the blocks share all columns of `y` of all tiles of pairs.
        unsafe { launch.shared(RINGS + GROUPS * (width / DEPTH) * STEP_BYTES).run(grid, THREADS) }
    }

    /// The sums of the tokens' `y`.
    fn add(&self, exec: &mut Exec, buffers: &Buffers, out: &mut Tensor) -> Result<(), OpError> {
        let &Self { op, experts: &Moe { routed, first, shared }, chosen, tokens, hidden, k, .. } = self;
        let arguments = AddExperts {
            y: buffers.y,
            chosen,
            out,
            tokens,
            hidden,
            k,
            first,
            experts: routed.count,
            shared: usize::from(shared.is_some()),
        };
        let launch = AddExperts::experts_add.launch(exec.gpu()?, op, arguments)?.overlapped();
        // SAFETY: a thread has two columns of a token; the grid covers all of them.
        unsafe { launch.run([tokens, hidden.div_ceil(2 * ADD_THREADS), 1], ADD_THREADS) }
    }

    /// Codes and address of the scales of a matrix of the shared expert; without a shared expert `none`, which is then
    /// not read.
    fn shared_matrix<'t>(&self, none: &'t Tensor, matrix: fn(&'t Experts) -> &'t Matrix) -> (&'t Tensor, u64)
    where
        Self: 't,
    {
        self.experts.shared.map_or((none, 0), |shared| matrix(shared).device())
    }
}
