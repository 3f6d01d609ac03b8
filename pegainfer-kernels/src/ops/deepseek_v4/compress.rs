//! The compressors: several tokens become one entry.

use super::batch::{PAGE_TOKENS, RaggedBatch};
use super::kv_quant::{index_row, round};
use super::rope::RopeTable;
use super::values::{read, write};
use crate::cpu::deepseek_v4::batch::write_ring;
use crate::cpu::deepseek_v4::compress::Pooling;
use crate::cpu::deepseek_v4::{kv_quant, norm, rope};
use crate::ops::check::Check;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Parameters of a compressor.
#[derive(Debug, Clone, Copy)]
pub struct CompressorSpec {
    /// Tokens from one entry to the next: 4 with overlap (CSA), 128 without (HCA).
    pub ratio: usize,
    /// Entries of the indexer: turned, and FP4 instead of FP8.
    pub index: bool,
    /// True if entries have the low precision of training.
    pub quantize: bool,
    /// Epsilon of the entries' norm.
    pub eps: f32,
}

impl CompressorSpec {
    /// An entry also has the `ratio` tokens before its own.
    pub fn overlap(self) -> bool {
        self.ratio == 4
    }

    /// Minimum number of tokens that the state must keep.
    pub fn ring(self) -> usize {
        if self.overlap() { 2 * self.ratio } else { self.ratio }
    }
}

/// The small weights of a compressor; its two matrices come before the op.
#[derive(Debug)]
pub struct CompressorWeights {
    /// Bias of the scores by position within an entry, `[ratio, width]` f32.
    pub position_bias: Tensor,
    /// `[dim]` bf16.
    pub norm: Tensor,
}

/// State of a compressor: the newest tokens of each sequence, with position `p` at row `p % ring`. `ring` is at least
/// [`CompressorSpec::ring`]. If steps verify drafts, it must be longer by the maximum number of drafts per row, so that
/// refused drafts overwrite nothing that is needed.
#[derive(Debug)]
pub struct CompressorState {
    /// `[slots, ring, width]` f32.
    pub values: Tensor,
    /// Scores, including position bias, in the same layout.
    pub scores: Tensor,
}

/// A compressor in a step, for the entries that the step completes.
///
/// Entry `i` belongs to the tokens from `ratio · i` on and is complete with its last one. Per channel it is the
/// softmax-weighted sum of their values (without overlap), or of the first half of the previous `ratio` tokens and the
/// second half of its own (with overlap; the first entry has no previous tokens). Scores get the bias of `position %
/// ratio`. Then follow RMS norm, RoPE at the position of the entry's first token, and the rounding of keys: FP8 outside
/// the rotated part, or for the indexer the Hadamard transform and FP4.
///
/// f32 up to the pooled value, which is rounded to the dtype of `entries`, as are norm, RoPE and transform. Every
/// device computes the same bits, apart from the last one of an exponential, because in low precision a different bit
/// could become a whole step.
/// the same bits, except the last one of an exponential: in low precision another bit could become a whole step.
#[derive(Debug)]
pub struct NewEntries<'a> {
    /// Values and scores of the step's tokens, the GEMMs with the two matrices, `[T, width]` f32; `width` is `2 dim`
    /// with overlap, else `dim`. Scores are without bias.
    pub tokens: (&'a Tensor, &'a Tensor),
    /// The compressor's small weights.
    pub weights: &'a CompressorWeights,
    /// Parameters of the compressor.
    pub spec: CompressorSpec,
    /// Values and scores of the tokens before, as [`CompressorState`] has them. The step's tokens come to it
    /// afterwards, see [`KeptTokens`].
    pub rings: [&'a Tensor; 2],
    /// `[pages, 128 / ratio, dim]` bf16 or f32.
    pub entries: &'a mut Tensor,
}

impl NewEntries<'_> {
    /// Width of an entry.
    pub(crate) fn dim(&self) -> usize {
        self.tokens.0.rows_cols().1 / if self.spec.overlap() { 2 } else { 1 }
    }

    /// The operands must fit a step of `tokens` tokens, and activations of `dtype`.
    pub(super) fn check(&self, check: Check, tokens_of_step: usize, dtype: DType) -> Result<(), OpError> {
        let Self { tokens, weights, spec, rings, entries } = self;
        check_rings(check, *tokens, (&weights.position_bias, *spec), *rings, tokens_of_step)?;
        check.is(&weights.norm, DType::Bf16, &[self.dim()])?;
        check.is(entries, dtype, &[entries.rows_cols().0, PAGE_TOKENS / spec.ratio, self.dim()])
    }

    /// Inputs of the compressor, for a record.
    pub(super) fn operands(&self) -> [&Tensor; 6] {
        let Self { tokens: (values, scores), weights, rings: [value_rings, score_rings], .. } = self;
        [values, scores, &weights.position_bias, &weights.norm, value_rings, score_rings]
    }

    /// Bytes that a step reads and writes: each token goes into one entry, or two.
    pub(super) fn bytes(&self) -> u64 {
        let (tokens, _) = self.tokens.0.rows_cols();
        2 * self.tokens.0.bytes() + (tokens / self.spec.ratio * self.dim() * self.entries.dtype().size()) as u64
    }

    /// Computes the entries on the host.
    pub(super) fn on_host(&mut self, table: &RopeTable, batch: &RaggedBatch<'_>) {
        let (dim, Self { tokens: (values, scores), weights, spec, rings, entries }) = (self.dim(), self);
        let (rows, ratio) = (batch.rows(), spec.ratio);
        let scores = biased(scores, &weights.position_bias, batch);
        let pooling = Pooling {
            values: values.host(),
            scores: &scores,
            value_rings: rings[0].host(),
            score_rings: rings[1].host(),
            ring: rings[0].shape()[1],
            ratio,
            dim,
            overlap: spec.overlap(),
        };
        let (norm_weight, dtype) = (read(&weights.norm), entries.dtype());
        let frequencies = table.frequencies.host::<f32>();
        let mut done = Vec::new();
        for (b, tokens) in rows.iter() {
            let complete = tokens.filter(|&t| (rows.positions[t] as usize + 1).is_multiple_of(ratio));
            for i in complete.map(|t| rows.positions[t] as usize / ratio) {
                let mut entry = pooling.entry(rows, b, i);
                finish_entry(&mut entry, (i * ratio) as u32, (&norm_weight, frequencies), *spec, dtype);
                done.push((rows.entry(b, i, PAGE_TOKENS / ratio), entry));
            }
        }
        let pages = entries.rows_cols().0;
        for (at, entry) in done {
            let (page, row) = (at / (PAGE_TOKENS / ratio), at % (PAGE_TOKENS / ratio));
            entries.set_range(page, 1);
            let mut values = read(entries).into_owned();
            values[row * dim..][..dim].copy_from_slice(&entry);
            write(entries, &values);
        }
        entries.set_rows(pages);
    }
}

/// A compressor in a step, for the tokens that it keeps: the newest of each row of the batch, once their entries are
/// complete.
#[derive(Debug)]
pub struct KeptTokens<'a> {
    /// As in [`NewEntries`].
    pub tokens: (&'a Tensor, &'a Tensor),
    /// The compressor's small weights.
    pub weights: &'a CompressorWeights,
    /// Parameters of the compressor.
    pub spec: CompressorSpec,
    /// State of the compressor.
    pub state: &'a mut CompressorState,
}

impl KeptTokens<'_> {
    /// The operands must fit a step of `tokens` tokens.
    pub(super) fn check(&self, check: Check, tokens: usize) -> Result<(), OpError> {
        let rings = [&self.state.values, &self.state.scores];
        check_rings(check, self.tokens, (&self.weights.position_bias, self.spec), rings, tokens)
    }

    /// Inputs of the compressor, for a record.
    pub(super) fn operands(&self) -> [&Tensor; 3] {
        [self.tokens.0, self.tokens.1, &self.weights.position_bias]
    }

    /// Puts the tokens into the rings on the host.
    pub(super) fn on_host(&mut self, batch: &RaggedBatch<'_>) {
        let Self { tokens: (values, scores), weights, state, .. } = self;
        let (ring, width) = (state.values.shape()[1], state.values.shape()[2]);
        let scores = biased(scores, &weights.position_bias, batch);
        write_ring(batch.rows(), values.host(), state.values.host_mut::<f32>(), ring, width);
        write_ring(batch.rows(), &scores, state.scores.host_mut::<f32>(), ring, width);
    }
}

/// Tokens, bias and rings of a compressor must fit each other and a step of `tokens` tokens.
fn check_rings(
    check: Check,
    (values, scores): (&Tensor, &Tensor),
    (bias, spec): (&Tensor, CompressorSpec),
    [value_rings, score_rings]: [&Tensor; 2],
    tokens: usize,
) -> Result<(), OpError> {
    let width = values.rows_cols().1;
    let &[slots, ring, _] = value_rings.shape() else {
        return check.that(false, "rings must be [slots, ring, width]");
    };
    check.is(values, DType::F32, &[tokens, width])?;
    check.is(scores, DType::F32, &[tokens, width])?;
    check.is(bias, DType::F32, &[spec.ratio, width])?;
    check.that(width.is_multiple_of(4), "the width of a compressor must be a multiple of four")?;
    check.that(ring >= spec.ring(), "the rings must hold the tokens of an entry")?;
    check.is(value_rings, DType::F32, &[slots, ring, width])?;
    check.is(score_rings, DType::F32, &[slots, ring, width])
}

/// Scores with the bias of each token's position within its entry.
fn biased(scores: &Tensor, bias: &Tensor, batch: &RaggedBatch<'_>) -> Vec<f32> {
    let ((ratio, width), bias) = (bias.rows_cols(), bias.host::<f32>());
    let mut scores = scores.host::<f32>().to_vec();
    for (score, position) in scores.chunks_exact_mut(width).zip(batch.positions.host::<u32>()) {
        let bias = &bias[*position as usize % ratio * width..][..width];
        score.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
    }
    scores
}

/// Converts a pooled entry to its stored form: norm, RoPE at `position`, and the rounding of keys, each rounded to
/// `dtype`.
fn finish_entry(
    entry: &mut [f32],
    position: u32,
    (norm_weight, frequencies): (&[f32], &[f32]),
    spec: CompressorSpec,
    dtype: DType,
) {
    round(entry, dtype);
    norm::norm(entry, norm_weight, spec.eps);
    round(entry, dtype);
    rope::rotate(entry, position, frequencies, false);
    round(entry, dtype);
    match (spec.index, spec.quantize) {
        (true, quantize) => index_row(entry, dtype, quantize),
        (false, true) => {
            let unrotated = entry.len() - 2 * frequencies.len();
            kv_quant::fp8(&mut entry[..unrotated], kv_quant::KEY_GROUP);
        }
        (false, false) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    const DIM: usize = 128;
    const SPEC: CompressorSpec = CompressorSpec { ratio: 4, index: false, quantize: false, eps: 1e-6 };

    fn f32s(n: usize, seed: u64) -> Vec<f32> {
        bf16s(n, seed).iter().map(|v| v.to_f32()).collect()
    }

    fn tensor(host: &mut Host, shape: &[usize], values: &[f32]) -> Tensor {
        let mut tensor = host.zeros("x", shape, DType::F32);
        tensor.host_mut::<f32>().copy_from_slice(values);
        tensor
    }

    /// Entry `i` by the formula in f64, before rotation: values and scores are `[tokens, 2 dim]`.
    fn pooled(values: &[f32], scores: &[f32], bias: &[f32], i: usize) -> Vec<f64> {
        let channel = |c: usize| {
            let token = |p: usize, half: usize| {
                let at = p * 2 * DIM + half * DIM + c;
                let score = f64::from(scores[at]) + f64::from(bias[p % 4 * 2 * DIM + half * DIM + c]);
                (score.exp(), f64::from(values[at]))
            };
            let before = (4 * i).saturating_sub(4)..4 * i;
            let pairs: Vec<(f64, f64)> =
                before.map(|p| token(p, 0)).chain((4 * i..4 * i + 4).map(|p| token(p, 1))).collect();
            pairs.iter().map(|(w, v)| w * v).sum::<f64>() / pairs.iter().map(|(w, _)| w).sum::<f64>()
        };
        let entry: Vec<f64> = (0..DIM).map(channel).collect();
        let scale = (entry.iter().map(|v| v * v).sum::<f64>() / DIM as f64 + 1e-6).sqrt().recip();
        entry.iter().map(|v| v * scale).collect()
    }

    #[test]
    fn trap_02_entries_rotate_at_their_first_token_and_trap_05_overlap_crosses_steps() {
        Host::each(|mut host| {
            let (values, scores, bias) = (f32s(14 * 2 * DIM, 1), f32s(14 * 2 * DIM, 2), f32s(4 * 2 * DIM, 3));
            let position_bias = tensor(&mut host, &[4, 2 * DIM], &bias);
            let norm = host.bf16("norm", &[DIM], &vec![half::bf16::ONE; DIM]);
            let weights = CompressorWeights { position_bias, norm };
            let table = RopeTable::new(&mut host.exec, 64, 160_000.0, None).unwrap();
            let ring = |host: &mut Host| host.zeros("ring", &[2, SPEC.ring(), 2 * DIM], DType::F32);
            let mut state = CompressorState { values: ring(&mut host), scores: ring(&mut host) };
            let mut entries = host.zeros("entries", &[3, 32, DIM], DType::F32);
            let mut page_tables = host.zeros("tables", &[1, 1], DType::U32);
            page_tables.host_mut::<u32>()[0] = 2;
            // Cut inside of entries, at their ends, and through the overlap.
            for (first, end) in [(0, 1), (1, 6), (6, 8), (8, 14)] {
                let part = |all: &[f32]| all[first * 2 * DIM..end * 2 * DIM].to_vec();
                let u = tensor(&mut host, &[end - first, 2 * DIM], &part(&values));
                let s = tensor(&mut host, &[end - first, 2 * DIM], &part(&scores));
                let positions = host.u32("positions", &(first as u32..end as u32).collect::<Vec<_>>());
                let (qo_indptr, slots) = (host.u32("indptr", &[0, (end - first) as u32]), host.u32("slots", &[1]));
                let batch = RaggedBatch {
                    qo_indptr: &qo_indptr,
                    positions: &positions,
                    slots: &slots,
                    page_tables: &page_tables,
                };
                let (tokens, spec, weights) = ((&u, &s), SPEC, &weights);
                let mut new =
                    NewEntries { tokens, weights, spec, rings: [&state.values, &state.scores], entries: &mut entries };
                new.check(Check("compress"), end - first, DType::F32).unwrap();
                new.on_host(&table, &batch);
                KeptTokens { tokens, weights, spec, state: &mut state }.on_host(&batch);
            }
            let got = &entries.host::<f32>()[2 * 32 * DIM..];
            for i in 0..3 {
                let mut expected: Vec<f32> = pooled(&values, &scores, &bias, i).iter().map(|v| *v as f32).collect();
                rope::rotate(&mut expected, 4 * i as u32, table.frequencies.host(), false);
                for (got, expected) in got[i * DIM..][..DIM].iter().zip(&expected) {
                    assert!((got - expected).abs() < 1e-4, "entry {i}: {got} but {expected}");
                }
            }
            assert!(got[3 * DIM..].iter().all(|v| *v == 0.0), "the fourth entry is not complete");
        });
    }
}
