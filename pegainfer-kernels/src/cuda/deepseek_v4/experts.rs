//! `routed_experts` and `shared_expert` (csrc/experts/mma.cu).

use super::activations::{Operand, Parts, TILES, Values, format, operand, shared_bytes, tile};
use super::experts_wgmma;
use super::large_expert::large_expert;
use crate::cuda::abi::{AddPairs, Down, Entry, GateUp, GroupPairs, Target};
use crate::cuda::scratch::Scratch;
use crate::limits::deepseek_v4_gemm::{DEPTH, ROWS, THREADS};
use crate::limits::moe::{GROUP_THREADS, MAX_CHOSEN, MAX_EXPERTS};
use crate::ops::deepseek_v4::{ExpertMath, Experts};
use pegainfer_core::cuda::{COUNTERS, WORKSPACE_BYTES};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

/// Entries by format and tile.
const GATE_UP: [[Entry<GateUp<'static>>; 4]; 3] = [
    [GateUp::gate_up_bf16_8, GateUp::gate_up_bf16_16, GateUp::gate_up_bf16_32, GateUp::gate_up_bf16_64],
    [GateUp::gate_up_fp8_8, GateUp::gate_up_fp8_16, GateUp::gate_up_fp8_32, GateUp::gate_up_fp8_64],
    [GateUp::gate_up_fp4_8, GateUp::gate_up_fp4_16, GateUp::gate_up_fp4_32, GateUp::gate_up_fp4_64],
];
const DOWN: [[Entry<Down<'static>>; 4]; 3] = [
    [Down::down_bf16_8, Down::down_bf16_16, Down::down_bf16_32, Down::down_bf16_64],
    [Down::down_fp8_8, Down::down_fp8_16, Down::down_fp8_32, Down::down_fp8_64],
    [Down::down_fp4_8, Down::down_fp4_16, Down::down_fp4_32, Down::down_fp4_64],
];

/// Experts chosen by tokens: numbers and weights, `[tokens, k]`, and the number of the first expert present.
struct ExpertChoice<'a> {
    chosen: &'a Tensor,
    weights: &'a Tensor,
    first: usize,
}

/// Grouped pairs of a pass: device addresses, or 0 if every token goes to the only expert.
struct Groups {
    tiles: u64,
    pairs: u64,
    weights: u64,
    /// Experts of a token.
    k: usize,
    /// The tile, as an index into [`TILES`], and the maximum number of tiles.
    tile: usize,
    max_tiles: usize,
}

/// Device address of row `first` of a matrix of `width` columns.
fn row(tensor: &Tensor, first: usize, width: usize) -> u64 {
    tensor.device() + (first * width * tensor.dtype().size()) as u64
}

/// Limits of the tiles of an op's pairs. The number of tiles does not change a bit of a result.
#[derive(Clone, Copy)]
struct Tiling {
    experts: usize,
    /// Scales of a row of h, each with a counter in a tile; 0 if h is not rounded.
    scales: usize,
}

impl Tiling {
    /// Maximum number of tiles.
    fn max_tiles(self, pairs: usize, tile: usize) -> usize {
        self.experts.min(pairs) + pairs / TILES[tile]
    }

    /// True if there are counters for all of them.
    fn fits(self, pairs: usize, tile: usize) -> bool {
        self.max_tiles(pairs, tile) * self.scales <= COUNTERS
    }

    /// The smallest tile for the pairs of an expert that fits, by its place in [`TILES`], and the most tiles.
    fn tile(self, pairs: usize) -> (usize, usize) {
        let last = TILES.len() - 1;
        let least = tile(pairs / self.experts.max(1));
        let tile = (least..last).find(|tile| self.fits(pairs, *tile)).unwrap_or(last);
        (tile, self.max_tiles(pairs, tile))
    }
}

/// Operands of one op that all passes share.
struct Call<'a> {
    op: &'static str,
    x: &'a Tensor,
    experts: &'a Experts,
    math: ExpertMath,
}

impl Call<'_> {
    /// True if the input of the last GEMM is rounded to FP8.
    fn rounds(&self) -> bool {
        self.math.quantize && self.experts.down.is_quantized()
    }

    fn tiling(&self) -> Tiling {
        let scales = if self.rounds() { self.experts.width() / DEPTH } else { 0 };
        Tiling { experts: self.experts.count, scales }
    }

    /// Number of tokens of a pass such that all intermediates fit the workspace, and there are counters for its tiles.
    fn pass(&self, k: usize) -> usize {
        let (hidden, width) = (self.x.rows_cols().1, self.experts.width());
        let (parts, size) = (Parts::of(self.x.dtype()).bytes(), self.x.dtype().size());
        let pair = width * (size + if self.rounds() { DType::Bf16.size() } else { parts }) + hidden * size + 64;
        let mut tokens = (WORKSPACE_BYTES - (1 << 20)) / (hidden * parts + k * pair);
        while tokens > 1 && !self.tiling().fits(tokens * k, TILES.len() - 1) {
            tokens /= 2;
        }
        tokens
    }

    /// Groups the pairs of some tokens.
    fn group(
        &self,
        exec: &mut Exec,
        choice: &ExpertChoice<'_>,
        tokens: &Range<usize>,
        scratch: &mut Scratch,
    ) -> Result<Groups, OpError> {
        let (k, experts) = (choice.chosen.rows_cols().1, self.experts.count);
        let count = tokens.len() * k;
        let (tile, max_tiles) = self.tiling().tile(count);
        let pairs = scratch.take(self.op, count * 4)?;
        let tiles = scratch.take(self.op, (1 + 3 * max_tiles) * 4)?;
        let arguments = GroupPairs {
            chosen: row(choice.chosen, tokens.start, k),
            pairs: Target::Scratch(pairs),
            tiles,
            count,
            first: choice.first,
            experts,
            tokens: TILES[tile],
        };
        let launch = GroupPairs::group_pairs.launch(exec.gpu()?, self.op, arguments)?;
        // SAFETY: one block; the buffers have place for all pairs and tiles.
        unsafe { launch.run([1, 1, 1], GROUP_THREADS)? };
        Ok(Groups { tiles, pairs, weights: row(choice.weights, tokens.start, k), k, tile, max_tiles })
    }

    /// The experts' outputs for some tokens, one row a pair: in `y`, or without it in the workspace. Returns their
    /// address.
    fn outputs(
        &self,
        exec: &mut Exec,
        groups: &Groups,
        tokens: &Range<usize>,
        y: Option<u64>,
        scratch: &mut Scratch,
    ) -> Result<u64, OpError> {
        let Self { op, x, experts, math } = *self;
        let (hidden, width, dtype) = (x.rows_cols().1, experts.width(), x.dtype());
        let pairs = tokens.len() * groups.k;
        let values = Values { address: row(x, tokens.start, hidden), dtype };
        let x = operand(exec, op, values, tokens.len() * hidden, scratch)?;
        let h = scratch.take(op, pairs * width * dtype.size())?;
        let low = if self.rounds() { scratch.take(op, pairs * width * DType::Bf16.size())? } else { 0 };
        let Groups { tiles, pairs: list, weights, tile, max_tiles, .. } = *groups;
        let to_f32 = usize::from(dtype == DType::F32);
        let ((gate, gate_scales), (up, up_scales)) = (experts.gate.device(), experts.up.device());
        let arguments = GateUp {
            x: x.address,
            gate,
            up,
            gate_scales,
            up_scales,
            tiles,
            pairs: list,
            weights,
            out: h,
            low,
            counters: exec.gpu()?.counters(),
            tokens: tokens.len(),
            experts_of_token: groups.k,
            width,
            k: hidden,
            planes: x.planes,
            plane: x.plane,
            limit: math.limit,
            to_f32,
        };
        let launch = GATE_UP[format(&experts.gate)][tile].launch(exec.gpu()?, op, arguments)?;
        let launch = launch.shared(shared_bytes(&experts.gate, tile));
        // SAFETY: the op checked the shapes; the grid covers every tile of `h`.
        unsafe { launch.run([width.div_ceil(ROWS / 2), max_tiles, 1], THREADS)? };
        let h = match self.rounds() {
            true => Operand { address: low, planes: 1, plane: 0 },
            false => operand(exec, op, Values { address: h, dtype }, pairs * width, scratch)?,
        };
        let y = y.map_or_else(|| scratch.take(op, pairs * hidden * dtype.size()), Ok)?;
        let (w, scales) = experts.down.device();
        let arguments = Down {
            h: h.address,
            w,
            scales,
            tiles,
            pairs: list,
            out: y,
            tokens: tokens.len(),
            hidden,
            k: width,
            planes: h.planes,
            plane: h.plane,
            to_f32,
        };
        let launch = DOWN[format(&experts.down)][tile].launch(exec.gpu()?, op, arguments)?;
        let launch = launch.shared(shared_bytes(&experts.down, tile));
        // SAFETY: as above, of `y`.
        unsafe { launch.run([hidden.div_ceil(ROWS), max_tiles, 1], THREADS)? };
        Ok(y)
    }
}

pub(crate) fn routed_experts(
    exec: &mut Exec,
    x: &Tensor,
    (chosen, weights): (&Tensor, &Tensor),
    (experts, first): (&Experts, usize),
    math: ExpertMath,
    shared: Option<&Tensor>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    if experts_wgmma::packs_experts(exec, x, experts, math)? {
        return experts_wgmma::routed_experts(exec, x, (chosen, weights), (experts, first), math, (shared, out));
    }
    let call = Call { op: "routed_experts", x, experts, math };
    let ((tokens, hidden), k) = (x.rows_cols(), chosen.rows_cols().1);
    if experts.count > MAX_EXPERTS || k > MAX_CHOSEN {
        let message = format!("{k} of {} experts: the GPU kernel takes {MAX_CHOSEN} of {MAX_EXPERTS}", experts.count);
        return Err(OpError { op: call.op, message });
    }
    // Waits for concurrent ops, such as `shared`.
    exec.join_side_streams()?;
    let choice = ExpertChoice { chosen, weights, first };
    let pass = call.pass(k);
    for from in (0..tokens).step_by(pass) {
        let part = from..(from + pass).min(tokens);
        let mut scratch = Scratch::new(exec)?;
        let groups = call.group(exec, &choice, &part, &mut scratch)?;
        let y = call.outputs(exec, &groups, &part, None, &mut scratch)?;
        let arguments = AddPairs {
            y,
            chosen: row(chosen, from, k),
            shared: shared.map_or(0, |shared| row(shared, from, hidden)),
            out: Target::Scratch(row(out, from, hidden)),
            hidden,
            k,
            first,
            experts: experts.count,
        };
        let entry = [AddPairs::add_pairs_bf16, AddPairs::add_pairs_f32][usize::from(x.dtype() == DType::F32)];
        let launch = entry.launch(exec.gpu()?, call.op, arguments)?.writes(out);
        // SAFETY: a thread a column of each token of the pass.
        unsafe { launch.run([part.len(), hidden.div_ceil(THREADS), 1], THREADS)? };
    }
    Ok(())
}

pub(crate) fn shared_expert(
    exec: &mut Exec,
    x: &Tensor,
    experts: &Experts,
    math: ExpertMath,
    (large, out): (bool, &mut Tensor),
) -> Result<(), OpError> {
    if large {
        return large_expert(exec, "shared_expert", x, (experts, math), out);
    }
    let call = Call { op: "shared_expert", x, experts, math };
    let (tokens, hidden) = x.rows_cols();
    let pass = call.pass(1);
    for from in (0..tokens).step_by(pass) {
        let part = from..(from + pass).min(tokens);
        let mut scratch = Scratch::new(exec)?;
        let (tile, _) = call.tiling().tile(part.len());
        let groups = Groups { tiles: 0, pairs: 0, weights: 0, k: 1, tile, max_tiles: part.len().div_ceil(TILES[tile]) };
        call.outputs(exec, &groups, &part, Some(row(out, from, hidden)), &mut scratch)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_pass_has_counters() {
        for (experts, scales) in [(256, 16), (384, 24), (1, 16), (1024, 15)] {
            let tiling = Tiling { experts, scales };
            let pass = (1..40_000).take_while(|pairs| tiling.fits(*pairs, TILES.len() - 1));
            let mut largest = 0;
            for pairs in pass {
                let (tile, max_tiles) = tiling.tile(pairs);
                assert!(
                    max_tiles * scales <= COUNTERS,
                    "{pairs} pairs of {experts} experts: {max_tiles} tiles of {}",
                    TILES[tile]
                );
                assert!(max_tiles >= pairs.div_ceil(TILES[tile]));
                largest = pairs;
            }
            assert!(largest > 2000, "{experts} experts: passes of {largest} pairs");
        }
    }
}
