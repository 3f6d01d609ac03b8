//! Vocabularies of any size. GPU kernels take rows of multiples of 8 logits, and every rank has an equal share of them,
//! so embedding and output matrix get rows of zeros. Their logits become -inf: such an id is never drawn, and adds
//! nothing to a probability.

use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights::{Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops::{self, EDIT_WORDS, SPAN_WORDS};

/// Elements of a vector load of the GPU kernels.
const VECTOR: usize = 8;

/// Rows of embedding and output matrix for `vocab` token ids: a multiple of 8 for each of `ranks` ranks.
pub fn padded_vocab(vocab: usize, ranks: usize) -> usize {
    vocab.next_multiple_of(VECTOR * ranks)
}

/// The rows of rank `shard` of a table of `vocab` token ids, tensor `name`, and of the zeros after it.
pub(super) fn table_rows(name: &str, vocab: usize, shard: Shard) -> Vec<SourceTensor> {
    let part = shard.part(padded_vocab(vocab, shard.ranks));
    let stored = part.start.min(vocab)..part.end.min(vocab);
    let zeros = SourceTensor::zeros(part.len() - stored.len());
    let stored = SourceTensor { name: name.to_owned(), rows: vocab, part: stored };
    [stored, zeros].into_iter().filter(|rows| !rows.part.is_empty()).collect()
}

/// Loads the embedding of `vocab` token ids, `[padded_vocab, hidden]` bf16: whole, also with several ranks.
pub fn load_embedding(
    loader: &mut Loader<'_>,
    name: &str,
    (vocab, hidden): (usize, usize),
    shard: Shard,
) -> Result<Tensor, WeightsError> {
    let zeros = SourceTensor::zeros(padded_vocab(vocab, shard.ranks) - vocab);
    let rows = [SourceTensor::whole(name.to_owned(), vocab), zeros];
    let parts = if rows[1].part.is_empty() { &rows[..1] } else { &rows };
    loader.stacked(name, parts, hidden)
}

/// The mask of the logits of rows of zeros.
#[derive(Debug)]
pub(super) struct VocabPadding {
    /// `[rows, SPAN_WORDS]`, all zeros: no edit, and the first mask.
    spans: Tensor,
    /// `[1, EDIT_WORDS]`, not read.
    edits: Tensor,
    /// `[1, padded_vocab / 32, rounded up]`.
    mask: Tensor,
}

impl VocabPadding {
    /// The mask of rows of `padded` logits, of which the first `vocab` are of token ids, for up to `rows` rows. `None`
    /// without padding.
    pub fn new(exec: &mut Exec, vocab: usize, padded: usize, rows: usize) -> Result<Option<Self>, OpError> {
        if padded == vocab {
            return Ok(None);
        }
        let words: Vec<u32> = (0..padded.div_ceil(32) as u32)
            .map(|word| u32::MAX.checked_shr((32 * (word + 1)).saturating_sub(vocab as u32)).unwrap_or(0))
            .collect();
        let mut tensor = |name: &str, shape: &[usize]| {
            let made = exec.tensor(name, shape, DType::U32);
            made.map_err(|error| OpError { op: "vocabulary padding", message: error.to_string() })
        };
        let (spans, edits) = (tensor("padding spans", &[rows, SPAN_WORDS])?, tensor("no edits", &[1, EDIT_WORDS])?);
        let mut mask = tensor("padding mask", &[1, words.len()])?;
        exec.fill_rows(&mut mask, &words)?;
        Ok(Some(Self { spans, edits, mask }))
    }

    /// Sets the padding of `logits`, `[rows, padded_vocab]` f32, to -inf.
    pub fn apply(&mut self, exec: &mut Exec, logits: &mut Tensor) -> Result<(), OpError> {
        self.spans.set_rows(logits.rows_cols().0);
        ops::adjust_logits(exec, logits, &self.spans, &self.edits, &self.mask)
    }
}
