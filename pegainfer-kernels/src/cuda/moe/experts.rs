//! `ops::moe::experts`: lists of pairs (csrc/moe/pairs.cu), the grouped GEMMs, sums.

use super::gemv;
use super::grouped::{down, gate_up};
use super::operands::{Down, GateUp, OP, Tiles, Weight};
use crate::choice::GroupedGemm;
use crate::cuda::abi::{MoeAddPairs, MoeGroupPairs, Target};
use crate::cuda::fp8::{Rounded, round_activations};
use crate::cuda::scratch::Scratch;
use crate::cuda::vectors;
use crate::limits::fp8::{BLOCK, ROW_ALIGNMENT};
use crate::limits::moe::{GROUP_THREADS, MAX_CHOSEN, MAX_EXPERTS, SUM_THREADS};
use crate::ops::Matrix;
use crate::ops::moe::Experts;
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

/// Columns of the outputs are computed in multiples of this, all at once where there is memory.
const COLUMNS: usize = 256;

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

/// Pairs from which several blocks list them.
const MANY_PAIRS: usize = 2048;
const LIST_BLOCKS: usize = 16;

/// Tokens of a pass of the grouped GEMMs, and their places in the workspace.
struct Pass<'a> {
    kernel: GroupedGemm,
    tokens: Range<usize>,
    /// Experts of a token.
    k: usize,
    chosen: u64,
    weights: u64,
    x: u64,
    /// The tokens' rows of `x` in FP8, for a kernel that takes them.
    rounded: Option<Rounded>,
    hidden: usize,
    width: usize,
    /// Rows of `h` and `y` are pairs.
    h: u64,
    y: u64,
    out: &'a Tensor,
}

/// Device address of row `first` of a matrix.
fn row(tensor: &Tensor, first: usize) -> u64 {
    tensor.device() + (first * tensor.rows_cols().1 * tensor.dtype().size()) as u64
}

impl Pass<'_> {
    fn count(&self) -> usize {
        self.tokens.len() * self.k
    }

    /// Pairs of a tile of mma.sync; `None`: wgmma.
    fn tile(&self) -> Option<usize> {
        if let GroupedGemm::Mma(tile) = self.kernel { Some(tile) } else { None }
    }

    /// Groups the pairs with the experts of a part, in lists at `pairs` and `tiles`.
    fn group(&self, exec: &mut Exec, part: &Part<'_>, (pairs, tiles): (u64, u64)) -> Result<Tiles, OpError> {
        let (chosen, count, first, experts) = (self.chosen, self.count(), part.first, part.count);
        let (lists, tokens) = (Target::Scratch(pairs), self.kernel.tile());
        let arguments = MoeGroupPairs { chosen, pairs: lists, tiles, count, first, experts, tokens };
        let launch = MoeGroupPairs::moe_group_pairs.launch(exec.gpu()?, OP, arguments)?;
        let blocks = if count < MANY_PAIRS { 1 } else { LIST_BLOCKS };
        // SAFETY: the buffers have place for all pairs and tiles.
        unsafe { launch.overlapped().run([blocks, 1, 1], GROUP_THREADS)? };
        Ok(Tiles { tiles, pairs, most: self.kernel.most_tiles(count, experts), count })
    }

    /// `h` of the experts of a part.
    fn gate_up(&self, exec: &mut Exec, part: &Part<'_>, tiles: Tiles) -> Result<(), OpError> {
        let Self { x, weights, h, k: experts_of_token, hidden, width, .. } = *self;
        let rounded = self.rounded.as_ref();
        let operands = GateUp { x, rounded, weights, h, experts_of_token, width, k: hidden };
        gate_up(exec.gpu()?, self.tile(), part.gate_up, tiles, operands)
    }

    /// The columns `from` to `from + columns` of the outputs `y` of a part.
    fn down(
        &self,
        exec: &mut Exec,
        part: &Part<'_>,
        tiles: Tiles,
        (from, columns): (usize, usize),
    ) -> Result<(), OpError> {
        let Self { h, y, hidden, width, .. } = *self;
        down(exec.gpu()?, self.tile(), part.down, tiles, Down { h, y, hidden, from, columns, k: width })
    }

    /// The sums of these columns of the experts of all parts.
    fn add(&self, exec: &mut Exec, experts: usize, (from, columns): (usize, usize)) -> Result<(), OpError> {
        let Self { y, chosen, hidden, k, .. } = *self;
        let out = Target::Scratch(row(self.out, self.tokens.start));
        let arguments = MoeAddPairs { y, chosen, out, hidden, from, columns, k, first: 0, experts };
        let launch = MoeAddPairs::moe_add_pairs.launch(exec.gpu()?, OP, arguments)?.writes(self.out);
        let blocks = columns.div_ceil(8 * SUM_THREADS);
        // SAFETY: the op checked the shapes; a thread has eight columns of a token of the pass.
        unsafe { launch.overlapped().run([self.tokens.len(), blocks, 1], SUM_THREADS) }
    }
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
    if let (GroupedGemm::Gemv, [Part { gate_up, down, .. }]) = (kernel, &parts[..]) {
        return gemv::run(exec, x, (chosen, weights), (*gate_up, *down), out);
    }
    let size = pass_tokens(hidden, width, k, parts.len());
    for from in (0..tokens).step_by(size) {
        let tokens = from..(from + size).min(tokens);
        let count = tokens.len() * k;
        let mut scratch = Scratch::new(exec)?;
        let mut take = |bytes: usize| scratch.take(OP, bytes);
        let h = take(count * width * DType::Bf16.size())?;
        let rounded = match kernel.rounds(experts.is_bf16()) {
            true => {
                let to = take(rounded_bytes(tokens.len(), hidden))?;
                Some(round_activations(exec.gpu()?, OP, x, (from, tokens.len()), to)?)
            }
            false => None,
        };
        let mut lists = Vec::new();
        for part in &parts {
            let words = [count, 1 + 3 * kernel.most_tiles(count, part.count)];
            lists.push((take(words[0] * DType::U32.size())?, take(words[1] * DType::U32.size())?));
        }
        let columns = scratch.left() / (count * DType::Bf16.size()) / COLUMNS * COLUMNS;
        let y = scratch.take(OP, count * columns.min(hidden) * DType::Bf16.size())?;
        let (chosen, weights, x) = (row(chosen, from), row(weights, from), row(x, from));
        let pass = Pass { kernel, tokens, k, chosen, weights, x, rounded, hidden, width, h, y, out: &*out };
        let mut tiles = Vec::new();
        for (part, lists) in parts.iter().zip(lists) {
            tiles.push(pass.group(exec, part, lists)?);
            pass.gate_up(exec, part, tiles[tiles.len() - 1])?;
        }
        for first in (0..hidden).step_by(columns) {
            let columns = (first, columns.min(hidden - first));
            for (part, tiles) in parts.iter().zip(&tiles) {
                pass.down(exec, part, *tiles, columns)?;
            }
            pass.add(exec, experts.count, columns)?;
        }
    }
    Ok(())
}

/// Bytes of the codes and scales of so many rows in FP8.
fn rounded_bytes(rows: usize, columns: usize) -> usize {
    rows.next_multiple_of(ROW_ALIGNMENT) * (columns + columns.div_ceil(BLOCK) * size_of::<f32>())
}

/// Tokens of a pass: the workspace has memory for their rows of `h`, for [`COLUMNS`] columns of `y`, a place in the list
/// of each of `parts` and at most a tile, and for a token its row in FP8.
fn pass_tokens(hidden: usize, width: usize, k: usize, parts: usize) -> usize {
    let pair = (COLUMNS + width) * DType::Bf16.size() + 4 * parts * DType::U32.size();
    let token = k.max(1) * pair + rounded_bytes(ROW_ALIGNMENT, hidden) / ROW_ALIGNMENT;
    ((WORKSPACE_BYTES - (1 << 20)) / token).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::{ExpertShape, Gpu};

    #[test]
    fn a_pass_fits_the_workspace() {
        for (count, k, hidden, width) in
            [(16, 4, 256, 128), (128, 8, 2048, 768), (257, 9, 2048, 512), (513, 11, 4096, 1024), (1, 1, 8, 8)]
        {
            let bytes = |tokens: usize| {
                let (pairs, columns) = (tokens * k, [hidden, width]);
                let kernel = GroupedGemm::choose(
                    &Gpu::PLANNED,
                    pairs,
                    ExpertShape { count, is_bf16: true, columns, in_parts: false },
                );
                let words = [pairs, 1 + 3 * kernel.most_tiles(pairs, count)].map(|words| 4 * words);
                let rows = [2 * pairs * width, 2 * pairs * COLUMNS, rounded_bytes(tokens, hidden)];
                rows.into_iter().chain(words).map(|bytes| bytes.next_multiple_of(256)).sum::<usize>()
            };
            let tokens = pass_tokens(hidden, width, k, 1);
            for tokens in [1, tokens / 2, tokens] {
                assert!(bytes(tokens) <= WORKSPACE_BYTES, "{tokens} tokens of {count} experts");
            }
            assert!(bytes(2 * tokens) > WORKSPACE_BYTES, "half of the workspace is unused");
        }
    }
}
