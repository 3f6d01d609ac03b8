//! `moe` at few tokens on Hopper (csrc/deepseek_v4_experts_skinny.cu).

use super::activations::Scratch;
use super::skinny::SkinnyPlan;
use crate::choice;
use crate::cuda::abi::{AddExperts, GroupPairs, SkinnyDown, SkinnyGateUp, Target};
use crate::limits::deepseek_v4::MAX_EXPERTS;
use crate::limits::deepseek_v4_gemm::{DEPTH, GROUP_THREADS, MAX_CHOSEN};
use crate::ops::deepseek_v4::{Activation, ExpertMath, Experts, Moe};
use crate::ops::{BlockScales, Matrix};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Most tokens of a step whose experts read their weights for each 8 pairs.
pub(in crate::cuda) const FEW_TOKENS: usize = 128;
/// Pairs of a tile.
const TILE: usize = 8;
/// Most pairs without a list: a block for each.
const UNLISTED: usize = 64;
/// Rows of a tile of weights.
const ROWS: usize = 64;

/// Whether the experts are in the formats of the official checkpoints, FP4 and FP8 in whole groups.
fn official(experts: &Moe<'_>) -> bool {
    let all =
        |experts: &Experts, is: fn(&Matrix) -> bool| [&experts.gate, &experts.up, &experts.down].into_iter().all(is);
    let fp8 = |w: &Matrix| matches!(w, Matrix::Fp8 { scale: BlockScales::E8m0(_), .. });
    all(experts.routed, |w| matches!(w, Matrix::Fp4 { .. })) && experts.shared.is_none_or(|shared| all(shared, fp8))
}

/// Whether [`moe`] takes these operands.
pub(crate) fn fuses_experts(
    exec: &mut Exec,
    x: Activation<'_>,
    experts: &Moe<'_>,
    math: ExpertMath,
) -> Result<bool, OpError> {
    let ((tokens, hidden), width) = (x.values.rows_cols(), experts.routed.width());
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    let whole = hidden.is_multiple_of(DEPTH) && width.is_multiple_of(DEPTH) && hidden <= 8192;
    // Few experts stay in the L2 cache, whatever the tokens.
    let few = tokens <= FEW_TOKENS || experts.routed.count * width * hidden < 4 << 20;
    let packed = x.packed.is_some() && x.values.dtype() == DType::Bf16 && math.quantize;
    Ok(hopper && whole && few && packed && official(experts) && experts.routed.count <= MAX_EXPERTS)
}

/// Scratch memory of a call.
struct Buffers {
    tiles: u64,
    pairs: u64,
    h: u64,
    y: u64,
}

/// The sum of a token's experts of this rank.
pub(crate) fn moe(
    exec: &mut Exec,
    op: &'static str,
    x: Activation<'_>,
    (chosen, weights): (&Tensor, &Tensor),
    experts: &Moe<'_>,
    math: ExpertMath,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Moe { routed, first, shared } = *experts;
    let ((tokens, hidden), k, width) = (x.values.rows_cols(), chosen.rows_cols().1, routed.width());
    let Some(packed) = x.packed.filter(|_| exec.device() == Device::Cuda && tokens > 0) else { return Ok(()) };
    if k > MAX_CHOSEN {
        return Err(OpError { op, message: format!("{k} experts of a token: the GPU kernel takes {MAX_CHOSEN}") });
    }
    let (count, all) = (tokens * k, tokens * (k + 1));
    let most = if count <= UNLISTED { count } else { routed.count.min(count) + count / TILE };
    let mut scratch = Scratch::new(exec)?;
    let listed = count > UNLISTED;
    let mut list = |bytes: usize| if listed { scratch.take(op, bytes) } else { Ok(0) };
    let (pairs, tiles) = (list(count * 4)?, list((1 + 3 * most) * 4)?);
    let buffers =
        Buffers { tiles, pairs, h: scratch.take(op, all * width * 2)?, y: scratch.take(op, all * hidden * 2)? };
    let Buffers { tiles, pairs, h, y } = buffers;
    if listed {
        let arguments = GroupPairs {
            chosen: chosen.device(),
            pairs: Target::Scratch(pairs),
            tiles,
            count,
            first,
            experts: routed.count,
            tokens: TILE,
        };
        let launch = GroupPairs::group_pairs.launch(exec.gpu()?, op, arguments)?;
        // SAFETY: one block; the buffers have place for all pairs and tiles.
        unsafe { launch.run([1, 1, 1], GROUP_THREADS)? };
    }
    let grid = most + if shared.is_some() { tokens.div_ceil(TILE) } else { 0 };
    let of_shared = |w: fn(&Experts) -> &Matrix| shared.map_or((0, 0), |shared| address(w(shared)));
    let ((gate, gate_scales), (up, up_scales)) = (routed.gate.device(), routed.up.device());
    let ((shared_gate, shared_gate_scales), (shared_up, shared_up_scales)) =
        (of_shared(|e| &e.gate), of_shared(|e| &e.up));
    // Four segments of k either way, with the same bits: more warpgroups for a tile where there are few tiles.
    let few_tiles = tokens == 1 && width <= 512 && hidden == 32 * DEPTH;
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
        limit: math.limit,
    };
    let launch = SkinnyGateUp::experts_gate_up_8.launch(exec.gpu()?, op, arguments)?.overlapped();
    let launch = launch.shared(plan.shared(hidden, 1, (TILE, 1), TILE));
    // SAFETY: the op checked the shapes; the grid covers every column of `h`, and every tile of pairs.
    unsafe { launch.run([width.div_ceil(ROWS / 2), grid, 1], plan.splits * 128)? };
    let ((w, scales), (shared_w, shared_scales)) = (routed.down.device(), of_shared(|e| &e.down));
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
    // SAFETY: as above, of `y`.
    unsafe { launch.run([hidden.div_ceil(ROWS * rows), grid, 1], rows * 128)? };
    let to_f32 = usize::from(out.dtype() == DType::F32);
    let arguments = AddExperts {
        y,
        chosen,
        out: out.device(),
        tokens,
        hidden,
        k,
        first,
        experts: routed.count,
        shared: usize::from(shared.is_some()),
        to_f32,
    };
    const THREADS: usize = 128;
    let launch = AddExperts::experts_add.launch(exec.gpu()?, op, arguments)?.writes(out).overlapped();
    // SAFETY: a thread two columns of each token.
    unsafe { launch.run([tokens, hidden.div_ceil(2 * THREADS), 1], THREADS) }
}

/// Device addresses of codes and scales.
fn address(w: &Matrix) -> (u64, u64) {
    let (codes, scales) = w.device();
    (codes.device(), scales)
}
