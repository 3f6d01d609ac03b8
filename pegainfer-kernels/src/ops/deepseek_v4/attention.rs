//! Attention over a window and compressed entries, with a sink.

use super::batch::{NO_ENTRY, PAGE_TOKENS, RaggedBatch, ring_host};
use super::kv_quant::round;
use super::packed::split_bytes;
use super::rope::{RopeTable, rotate};
use super::values::{Rows, activation, cpu, read, rows, write};
use crate::choice::DenseGemm;
use crate::cpu::deepseek_v4::attention as reference;
use crate::cpu::deepseek_v4::batch::Source;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use crate::ops::matrix::Matrix;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::team;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::borrow::Cow;

/// Tokens of the attention window.
pub const WINDOW: usize = 128;

/// Compressed entries that a token sees in addition to its window.
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
    /// Entries chosen by `select_entries`.
    Chosen {
        /// `[pages, 128 / ratio, dim]`.
        entries: &'a Tensor,
        /// `[T, k]` u32; at most as many per token as are complete at its position.
        chosen: &'a Tensor,
    },
}

impl<'a> Visible<'a> {
    /// The cache that they are in.
    pub(crate) fn entries(self) -> Option<&'a Tensor> {
        match self {
            Self::Nothing => None,
            Self::All { entries, .. } | Self::Chosen { entries, .. } => Some(entries),
        }
    }

    /// Checks for `tokens` tokens with keys of `dim` elements.
    fn check(self, check: Check, (tokens, dim): (usize, usize)) -> Result<(), OpError> {
        if let Some(entries) = self.entries() {
            let &[pages, per_page, _] = entries.shape() else { return check.that(false, "entries must be in pages") };
            activation(check, entries, &[pages, per_page, dim])?;
        }
        if let Self::Chosen { chosen, .. } = self {
            check.is(chosen, DType::U32, &[tokens, chosen.rows_cols().1])?;
            check.that(chosen.rows_cols().1 > 0, "no entry can be chosen")?;
        }
        Ok(())
    }
}

/// Maximum number of tokens whose output may be packed.
pub const SPLIT_TOKENS: usize = DenseGemm::MIN_TOKENS - 1;

/// Second output of attention in the form that `grouped_matmul` takes; see [`split_bytes`].
#[derive(Debug)]
pub struct Split<'a> {
    /// `[T, split_bytes]` u8.
    pub packed: &'a mut Tensor,
    /// Columns of a group of heads.
    pub columns: usize,
}

/// True if on this device [`sparse_attention`] with an output like `out` may write it packed, and `grouped_matmul` with
/// `w` takes it.
pub fn takes_split(exec: &mut Exec, out: &Tensor, w: &Matrix) -> Result<bool, OpError> {
    gpu::takes_split(exec, out, w)
}

/// Every query head over one set of keys, which are also the values: `l[k] = q · key[k] / sqrt(dim)`, `out = Σ_k
/// exp(l[k]) key[k] / (Σ_k exp(l[k]) + exp(sink))`.
///
/// The keys of a token at position `p` are those of positions `p - window + 1` to `p`, of this step (`kv`) or earlier
/// (`rings`), and the visible entries; `window` is [`WINDOW`], or `ring` if that is less. `q`, `out`: `[T, heads,
/// dim]`; `kv`: `[T, dim]`; `rings`: `[slots, ring, dim]`, the key of position `p` at `p % ring`; all bf16 or f32;
/// `sink`: `[heads]` f32. `dim` is a multiple of 32. The dot products, softmax and weighted sum are f32. If `out` is
/// bf16, `exp(l)` is rounded to bf16 in the weighted sum but not in the denominator, as in the reference.
///
/// Keys are values, so the output is rotated as well: after it is rounded, the last dimensions of each head are rotated
/// back by the query's position (the inverse of `rope` with `table`) and rounded again. Then the newest tokens of each
/// row of the batch are written to its ring. `split`: destination of the packed output, if [`takes_split`] says so.
pub fn sparse_attention(
    exec: &mut Exec,
    q: &Tensor,
    (kv, rings): (&Tensor, &mut Tensor),
    visible: Visible<'_>,
    (sink, table): (&Tensor, &RopeTable),
    batch: &RaggedBatch<'_>,
    (out, split): (&mut Tensor, Option<Split<'_>>),
) -> Result<(), OpError> {
    let check = Check("sparse_attention");
    let &[tokens, heads, dim] = q.shape() else { return check.that(false, "q must be [tokens, heads, dim]") };
    let &[slots, ring, _] = rings.shape() else { return check.that(false, "rings must be [slots, ring, dim]") };
    batch.check(check, tokens)?;
    activation(check, q, &[tokens, heads, dim])?;
    rows(check, kv, (tokens, dim))?;
    check.is(rings, kv.dtype(), &[slots, ring, dim])?;
    check.that(2 * table.frequencies.elements() <= dim, "more frequencies than pairs")?;
    if let Some(Split { packed, columns }) = &split {
        check.that(
            columns.is_multiple_of(dim) && (heads * dim).is_multiple_of(*columns),
            "heads must be whole groups",
        )?;
        check.is(packed, DType::U8, &[tokens, split_bytes(heads * dim / columns, *columns)])?;
    }
    activation(check, out, &[tokens, heads, dim])?;
    check.is(sink, DType::F32, &[heads])?;
    check.that(dim.is_multiple_of(32), "dim must be a multiple of 32")?;
    visible.check(check, (tokens, dim))?;
    exec.record(|_| record(q, (kv, &*rings), visible, sink, batch, out));
    if exec.device() == Device::Cuda {
        return gpu::sparse_attention(exec, q, (kv, rings), visible, (sink, &table.frequencies), batch, (out, split));
    }
    let Some(isa) = cpu(check, exec)? else { return Ok(()) };
    let (queries, fresh, old) = (read(q), read(kv), Rows::of(rings));
    let rows = batch.rows();
    let (window, entries) = (ring.min(WINDOW), visible.entries().map(Rows::of));
    let rows_of_tokens = rows.rows_of_tokens();
    let mut result = vec![0.0; q.elements()];
    let attend = |t: usize, out: &mut [f32]| {
        let (Some(b), p) = (rows_of_tokens[t], rows.positions[t] as usize) else { return };
        let recent = (p + 1).saturating_sub(window)..p + 1;
        let mut keys: Vec<Cow<'_, [f32]>> = Vec::with_capacity(window);
        keys.extend(recent.map(|p| match rows.source(b, p, ring) {
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
        reference::attend(
            isa,
            &queries[t * heads * dim..][..heads * dim],
            &keys,
            sink.host(),
            q.dtype() == DType::Bf16,
            out,
        );
    };
    team::for_each_chunk(&mut result, heads * dim, attend);
    round(&mut result, out.dtype());
    rotate(&mut result, (heads, dim), batch.positions, table, true);
    write(out, &result);
    ring_host(kv, batch, rings);
    Ok(())
}

fn record(
    q: &Tensor,
    (kv, rings): (&Tensor, &Tensor),
    visible: Visible<'_>,
    sink: &Tensor,
    batch: &RaggedBatch<'_>,
    out: &Tensor,
) -> OpRecord {
    let (rows, pages) = batch.page_tables.rows_cols();
    let (window, dim) = (rings.shape()[1].min(WINDOW), rings.shape()[2]);
    // Visible entries per token, and stored entries over all rows: at most the capacity of the tables.
    let (seen, held) = match visible {
        Visible::Nothing => (0, 0),
        Visible::All { ratio, .. } => (pages * PAGE_TOKENS / ratio, rows * pages * PAGE_TOKENS / ratio),
        Visible::Chosen { chosen, .. } => (chosen.rows_cols().1, chosen.elements()),
    };
    let keys = (rows * window + held) * dim * kv.dtype().size();
    let flops = 4 * q.elements() * (window + seen);
    let (kernel, chosen) = match visible {
        Visible::Nothing => ("window", None),
        Visible::All { .. } => ("all entries", None),
        Visible::Chosen { chosen, .. } => ("chosen entries", Some(chosen)),
    };
    let reads = [q, kv, rings, sink].into_iter().chain(batch.operands()).chain(visible.entries()).chain(chosen);
    // Tokens that newer ones of the step overwrite are not written to a ring.
    let kept = kv.bytes().min((rows * rings.shape()[1] * dim * kv.dtype().size()) as u64);
    let bytes = q.bytes() + out.bytes() + kv.bytes() + keys as u64 + 2 * kept;
    OpRecord::new("sparse_attention", kernel, &reads.collect::<Vec<_>>(), &[out, rings], flops as u64).with_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};
    use pegainfer_core::kv::NO_SLOT;

    const DIM: usize = 32;

    #[test]
    fn window_entries_and_sink_by_the_formula() {
        Host::each(|mut host| {
            let f32s = |n: usize, seed| bf16s(n, seed).iter().map(|v| v.to_f32()).collect::<Vec<_>>();
            let mut tensor = |shape: &[usize], values: &[f32]| {
                let mut tensor = host.zeros("x", shape, DType::F32);
                tensor.host_mut::<f32>().copy_from_slice(values);
                tensor
            };
            // Positions 6 to 8 of a window of 4: the ring of slot 1 has 2 to 5, at p % 4.
            let (q, fresh, old, entries) =
                (f32s(3 * 2 * DIM, 1), f32s(3 * DIM, 2), f32s(8 * DIM, 3), f32s(64 * DIM, 4));
            let (tq, kv) = (tensor(&[3, 2, DIM], &q), tensor(&[3, DIM], &fresh));
            let (pages, sink) = (tensor(&[2, 32, DIM], &entries), tensor(&[2], &[0.5, -3.0]));
            let (mut out, mut rings) = (tensor(&[3, 2, DIM], &vec![0.0; 6 * DIM]), tensor(&[2, 4, DIM], &old));
            // At a frequency of 0 nothing is rotated.
            let table = RopeTable { frequencies: host.zeros("rope", &[DIM / 4], DType::F32) };
            let (indptr, positions) = (host.u32("indptr", &[0, 3]), host.u32("positions", &[6, 7, 8]));
            let slots = host.u32("slots", &[1]);
            let mut page_tables = host.zeros("tables", &[1, 1], DType::U32);
            page_tables.host_mut::<u32>()[0] = 1;
            let batch =
                RaggedBatch { qo_indptr: &indptr, positions: &positions, slots: &slots, page_tables: &page_tables };
            let mut chosen = host.zeros("chosen", &[3, 2], DType::U32);
            chosen.host_mut::<u32>().copy_from_slice(&[0, NO_ENTRY, 0, 1, NO_ENTRY, NO_ENTRY]);
            let seen = [
                (Visible::Nothing, [0, 0, 0]),
                (Visible::All { entries: &pages, ratio: 4 }, [1, 2, 2]),
                (Visible::Chosen { entries: &pages, chosen: &chosen }, [1, 2, 0]),
            ];
            for (visible, counts) in seen {
                rings.host_mut::<f32>().copy_from_slice(&old);
                let keys = (&kv, &mut rings);
                let to = (&mut out, None);
                sparse_attention(&mut host.exec, &tq, keys, visible, (&sink, &table), &batch, to).unwrap();
                for (p, key) in (5..9).zip(old[5 * DIM..][..DIM].chunks(DIM).chain(fresh.chunks(DIM))) {
                    assert_eq!(&rings.host::<f32>()[(4 + p % 4) * DIM..][..DIM], key, "position {p}");
                }
                for (i, got) in out.host::<f32>().chunks(DIM).enumerate() {
                    let (t, h) = (i / 2, i % 2);
                    let window = (t + 3..t + 7).map(|p| match p {
                        6.. => &fresh[(p - 6) * DIM..][..DIM],
                        _ => &old[(4 + p % 4) * DIM..][..DIM],
                    });
                    let entry = |e: usize| &entries[(32 + e) * DIM..][..DIM];
                    let keys: Vec<&[f32]> = window.chain((0..counts[t]).map(entry)).collect();
                    let q = &q[i * DIM..][..DIM];
                    let dot = |k: &[f32]| q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
                    let weights: Vec<f64> = keys.iter().map(|k| (dot(k) / (DIM as f64).sqrt()).exp()).collect();
                    let sum = weights.iter().sum::<f64>() + f64::from([0.5f32, -3.0][h]).exp();
                    for (c, got) in got.iter().enumerate() {
                        let exact = keys.iter().zip(&weights).map(|(k, w)| w * f64::from(k[c])).sum::<f64>() / sum;
                        assert!((f64::from(*got) - exact).abs() < 1e-5, "token {t}, head {h}: {got} but {exact}");
                    }
                }
            }
        });
    }

    #[test]
    fn a_row_without_a_slot_has_zeros_and_changes_nothing() {
        Host::each(|mut host| {
            let ones = vec![half::bf16::ONE; 2 * DIM];
            let (q, kv) = (host.bf16("q", &[2, 1, DIM], &ones), host.bf16("kv", &[2, DIM], &ones));
            let mut rings = host.zeros("rings", &[1, 4, DIM], DType::Bf16);
            let (mut out, sink) = (host.bf16("out", &[2, 1, DIM], &ones), host.zeros("sink", &[1], DType::F32));
            let (indptr, positions) = (host.u32("indptr", &[0, 1, 2]), host.u32("positions", &[0, u32::MAX]));
            let slots = host.u32("slots", &[0, NO_SLOT]);
            let mut page_tables = host.zeros("tables", &[2, 1], DType::U32);
            page_tables.host_mut::<u32>()[1] = u32::MAX;
            let batch =
                RaggedBatch { qo_indptr: &indptr, positions: &positions, slots: &slots, page_tables: &page_tables };
            let table = RopeTable::new(&mut host.exec, DIM / 2, 1e4, None).unwrap();
            let (keys, to) = ((&kv, &mut rings), (&mut out, None));
            sparse_attention(&mut host.exec, &q, keys, Visible::Nothing, (&sink, &table), &batch, to).unwrap();
            let (first, padded) = out.host::<half::bf16>().split_at(DIM);
            assert!(first.iter().all(|v| v.to_f32() > 0.9) && padded.iter().all(|v| v.to_f32() == 0.0));
            let (written, others) = rings.host::<half::bf16>().split_at(DIM);
            assert!(written.iter().all(|v| v.to_f32() == 1.0) && others.iter().all(|v| v.to_f32() == 0.0));
        });
    }
}
