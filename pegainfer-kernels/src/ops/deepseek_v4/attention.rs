//! Attention over a window and compressed entries, with a sink.

use super::batch::{Batch, NO_ENTRY, PAGE_TOKENS};
use super::values::{Rows, activation, cpu, read, rows, write};
use crate::cpu::deepseek_v4::attention as twin;
use crate::cpu::deepseek_v4::batch::Source;
use crate::ops::check::Check;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use rayon::prelude::*;
use std::borrow::Cow;

/// Which compressed entries a token sees besides its window.
#[derive(Debug, Clone, Copy)]
pub enum Visible<'a> {
    /// None.
    Nothing,
    /// Every entry that is complete at its position: `i < (position + 1) / ratio`.
    All {
        /// `[pages, 128 / ratio, dim]`.
        entries: &'a Tensor,
        /// Tokens from one entry to the next.
        ratio: usize,
    },
    /// Those that `select_entries` chose.
    Chosen {
        /// `[pages, 128 / ratio, dim]`.
        entries: &'a Tensor,
        /// `[T, k]` u32.
        chosen: &'a Tensor,
    },
}

impl<'a> Visible<'a> {
    fn entries(self) -> Option<&'a Tensor> {
        match self {
            Self::Nothing => None,
            Self::All { entries, .. } | Self::Chosen { entries, .. } => Some(entries),
        }
    }
}

/// Every query head over one set of keys, which are the values, too: `l[k] = q · key[k] / sqrt(dim)`,
/// `out = Σ_k exp(l[k]) key[k] / (Σ_k exp(l[k]) + exp(sink))`.
///
/// The keys of a token at position `p` are those of the positions `p - window + 1` to `p`, of this step (`kv`) or before
/// (`rings`), and the visible entries. `q`, `out`: `[T, heads, dim]`; `kv`: `[T, dim]`; `rings`: `[slots, window, dim]`,
/// bf16 or f32; `sink`: `[heads]` f32. Both products, the softmax and the sum are f32; where `out` is bf16, `exp(l)` is
/// rounded to bf16 before the second product and not in the sum, as in the reference. `dim` is a multiple of 32.
pub fn sparse_attention(
    exec: &mut Exec,
    q: &Tensor,
    (kv, rings): (&Tensor, &Tensor),
    visible: Visible<'_>,
    sink: &Tensor,
    batch: &Batch<'_>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("sparse_attention");
    let &[tokens, heads, dim] = q.shape() else { return check.that(false, "q must be [tokens, heads, dim]") };
    let &[slots, window, _] = rings.shape() else { return check.that(false, "rings must be [slots, window, dim]") };
    batch.check(check, tokens)?;
    activation(check, q, &[tokens, heads, dim])?;
    rows(check, kv, (tokens, dim))?;
    activation(check, rings, &[slots, window, dim])?;
    activation(check, out, &[tokens, heads, dim])?;
    check.is(sink, DType::F32, &[heads])?;
    check.that(dim.is_multiple_of(32), "dim must be a multiple of 32")?;
    if let Visible::Chosen { chosen, .. } = visible {
        check.is(chosen, DType::U32, &[tokens, chosen.rows_cols().1])?;
    }
    exec.record(|_| record(q, (kv, rings), visible, sink, batch, out));
    let Some(isa) = cpu(check, exec)? else { return Ok(()) };
    let (queries, fresh, old) = (read(q), read(kv), Rows::of(rings));
    let rows = batch.rows();
    let entries = visible.entries().map(Rows::of);
    let of_tokens = rows.of_tokens();
    let mut result = vec![0.0; q.elements()];
    let attend = |(t, out): (usize, &mut [f32])| {
        let (b, p) = (of_tokens[t], rows.positions[t] as usize);
        let recent = (p + 1).saturating_sub(window)..p + 1;
        let mut keys: Vec<Cow<'_, [f32]>> = Vec::with_capacity(window);
        keys.extend(recent.map(|p| match rows.source(b, p, window) {
            Source::Fresh(t) => Cow::Borrowed(&fresh[t * dim..][..dim]),
            Source::Ring(at) => old.row(at, dim),
        }));
        if let Some(entries) = entries {
            let per_page = visible.entries().map_or(1, |e| e.shape()[1]);
            let entry = |i: usize| entries.row(rows.entry(b, i, per_page), dim);
            match visible {
                Visible::Chosen { chosen, .. } => {
                    let k = chosen.rows_cols().1;
                    let row = &chosen.host::<u32>()[t * k..][..k];
                    keys.extend(row.iter().take_while(|i| **i != NO_ENTRY).map(|i| entry(*i as usize)));
                }
                _ => keys.extend((0..(p + 1) / (PAGE_TOKENS / per_page)).map(entry)),
            }
        }
        twin::attend(
            isa,
            &queries[t * heads * dim..][..heads * dim],
            &keys,
            sink.host(),
            q.dtype() == DType::Bf16,
            out,
        );
    };
    result.par_chunks_exact_mut(heads * dim).enumerate().for_each(attend);
    write(out, &result);
    Ok(())
}

fn record(
    q: &Tensor,
    (kv, rings): (&Tensor, &Tensor),
    visible: Visible<'_>,
    sink: &Tensor,
    batch: &Batch<'_>,
    out: &Tensor,
) -> OpRecord {
    let (rows, pages) = batch.page_tables.rows_cols();
    let (window, dim) = (rings.shape()[1], rings.shape()[2]);
    // Of the entries, per token and over all rows: at most what the tables hold.
    let (seen, held) = match visible {
        Visible::Nothing => (0, 0),
        Visible::All { ratio, .. } => (pages * PAGE_TOKENS / ratio, rows * pages * PAGE_TOKENS / ratio),
        Visible::Chosen { chosen, .. } => (chosen.rows_cols().1, chosen.elements()),
    };
    let keys = (rows * window + held) * dim * kv.dtype().size();
    let flops = 4 * q.elements() * (window + seen);
    let reads: Vec<&Tensor> = [q, kv, rings, sink].into_iter().chain(visible.entries()).collect();
    let bytes = q.bytes() + out.bytes() + kv.bytes() + keys as u64;
    OpRecord::new("sparse_attention", "tokens", &reads, &[out], flops as u64).with_bytes(bytes)
}
