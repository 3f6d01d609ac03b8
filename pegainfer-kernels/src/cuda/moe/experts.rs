//! `ops::moe::experts`: lists of pairs (csrc/moe/pairs.cu), the grouped GEMMs, sums.

use super::grouped::{Down, GateUp, OP, Tiles, Weight, down, gate_up};
use crate::choice::GroupedGemm;
use crate::cuda::abi::{MoeAddPairs, MoeGroupPairs, Target};
use crate::cuda::scratch::Scratch;
use crate::cuda::vectors;
use crate::limits::moe::{GROUP_THREADS, MAX_CHOSEN, MAX_EXPERTS, SUM_THREADS};
use crate::ops::Matrix;
use crate::ops::moe::Experts;
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

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
    choice: &'a Tensor,
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

/// Device address of row `first` of a matrix.
fn row(tensor: &Tensor, first: usize) -> u64 {
    tensor.device() + (first * tensor.rows_cols().1 * tensor.dtype().size()) as u64
}

impl Pass<'_> {
    fn count(&self) -> usize {
        self.tokens.len() * self.k
    }

    /// Groups the pairs with the experts of a part. The pairs of a single token are tiles as they are.
    fn group(&self, exec: &mut Exec, part: &Part<'_>) -> Result<Tiles<'_>, OpError> {
        let Self { chosen, choice, pairs, tiles, kernel, .. } = *self;
        let (count, first, experts) = (self.count(), part.first, part.count);
        if kernel == GroupedGemm::Gemv && self.tokens.len() == 1 {
            return Ok(Tiles { tiles: 0, pairs: 0, most: count, chosen, choice, first, experts });
        }
        let lists = Target::Scratch(pairs);
        let arguments = MoeGroupPairs { chosen, pairs: lists, tiles, count, first, experts, tokens: kernel.tile() };
        let launch = MoeGroupPairs::moe_group_pairs.launch(exec.gpu()?, OP, arguments)?;
        // SAFETY: one block; the buffers have place for all pairs and tiles.
        unsafe { launch.overlapped().run([1, 1, 1], GROUP_THREADS)? };
        Ok(Tiles { tiles, pairs, most: kernel.most_tiles(count, experts), chosen, choice, first, experts })
    }

    /// The outputs `y` of the experts of a part.
    fn outputs(&self, exec: &mut Exec, part: &Part<'_>) -> Result<(), OpError> {
        let tiles = self.group(exec, part)?;
        let Self { kernel, x, weights, h, y, k: experts_of_token, hidden, width, .. } = *self;
        let gpu = exec.gpu()?;
        gate_up(gpu, kernel, part.gate_up, tiles, GateUp { x, weights, h, experts_of_token, width, k: hidden })?;
        down(gpu, kernel, part.down, tiles, Down { h, y, hidden, k: width })
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
        let choice = chosen;
        let (chosen, weights, x) = (row(chosen, from), row(weights, from), row(x, from));
        let out = &*out;
        let pass = Pass { kernel, tokens, k, chosen, choice, weights, x, hidden, width, h, y, pairs, tiles, out };
        for part in &parts {
            pass.outputs(exec, part)?;
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
    use crate::choice::Gpu;

    /// Bytes of the workspace that a pass of so many tokens takes.
    fn bytes(tokens: usize, k: usize, count: usize, (hidden, width): (usize, usize)) -> usize {
        let pairs = tokens * k;
        let kernel = GroupedGemm::choose(&Gpu::PLANNED, pairs, count, true);
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
}
