//! DeepSeek-V4's compressors, indexer, attention and rings, over ragged batches.

use super::call::{Call, Family, Launch, all_written};
use super::case::{EPS, Output, Values};
use super::deepseek_v4_batch::{Operands, Rows};
use super::operands::{input_seed, tensor, unit};
use super::variant::Variant;
use crate::ops::deepseek_v4::{
    self as ops, CompressorSpec, CompressorState, CompressorWeights, NO_ENTRY, PAGE_TOKENS, RopeTable, SelectSpec,
    TokenShare, Visible,
};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

/// Dimensions of an entry that are rotated.
const ROPE_DIM: usize = 64;

/// Where the batch is among what an op reads; `None` for ops without one.
fn batch_place(op: &str) -> Option<usize> {
    match op {
        "write_ring" => Some(1),
        "select_entries" => Some(3),
        "compress" | "sparse_attention" => Some(4),
        _ => None,
    }
}

fn has(record: &OpRecord) -> bool {
    record.op == "copy_slot" || batch_place(record.op).is_some()
}

/// Rows that pad a step are among those of every third.
fn variants(record: &OpRecord) -> Vec<Variant> {
    let slots = batch_place(record.op).and_then(|first| record.reads.get(first + 2));
    if slots.is_some_and(|slots| slots.shape[0] > 2) {
        vec![Variant::Plain, Variant::Padded]
    } else {
        vec![Variant::Plain]
    }
}

/// The operands that `compress` takes in structs of its own.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    if call.record.op == "compress" {
        let [_, _, bias, norm, ..] = &call.record.reads[..] else { return Err(call.unknown()) };
        let (position_bias, norm) = (tensor(exec, bias, call.case, 2)?, tensor(exec, norm, call.case, 3)?);
        launch.compressor = Some(CompressorWeights { position_bias, norm });
        launch.rope = Some(RopeTable::new(exec, ROPE_DIM, 160_000.0, None)?);
    }
    Ok(())
}

/// The batch, and values that make a difference: scores of entries that are exact in f32, so that all devices choose alike,
/// with many ties; attention that prefers some keys.
fn fill(exec: &mut Exec, call: &mut Call<'_>, _: &mut Launch, values: Values) -> Result<(), OpError> {
    let Some(first) = batch_place(call.record.op) else { return Ok(()) };
    // Pages of the cache that the batch is in.
    let pages = match call.record.op {
        "compress" => call.record.writes.get(1),
        "select_entries" => call.record.reads.get(2),
        "sparse_attention" => call.record.reads.get(8),
        _ => None,
    };
    let pages = pages.map(|operand| operand.shape[0]);
    let Some(operands) = call.read.get_mut(first..first + 4) else { return Err(call.unknown()) };
    let Some(rows) = Rows::new(operands, pages, call.case, (call.variant, values)) else { return Err(call.unknown()) };
    rows.fill(exec, operands)?;
    let seed = input_seed(values);
    match (call.record.op, &mut call.read[..]) {
        ("select_entries", [q, weights, entries, ..]) => {
            let small = |seed: u64, i: usize| (rng::bits(seed, i as u64) % 5) as f32 - 2.0;
            write(exec, q, |i| small(seed, i))?;
            write(exec, weights, |i| small(seed + 1, i) / 4.0)?;
            write(exec, entries, |i| small(seed + 2, i))
        }
        ("sparse_attention", [q, _, _, sink, .., last]) => {
            write(exec, q, |i| 8.0 * unit(seed, i))?;
            write(exec, sink, |i| 4.0 * unit(3, i))?;
            if chosen_entries(call.record) {
                let chosen: Vec<u32> = choose(&rows, last.rows_cols().1);
                exec.fill_rows(last, &chosen)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Activations, bf16 or f32.
fn write(exec: &mut Exec, tensor: &mut Tensor, value: impl Fn(usize) -> f32 + Sync) -> Result<(), OpError> {
    let elements = tensor.elements();
    match tensor.dtype() {
        DType::F32 => exec.write(tensor, 0..elements, |first, out: &mut [f32]| {
            out.iter_mut().enumerate().for_each(|(i, v)| *v = value(first + i));
        }),
        _ => exec.write(tensor, 0..elements, |first, out: &mut [bf16]| {
            out.iter_mut().enumerate().for_each(|(i, v)| *v = bf16::from_f32(value(first + i)));
        }),
    }
}

/// Whether a call of `sparse_attention` has a list of chosen entries, behind the entries.
fn chosen_entries(record: &OpRecord) -> bool {
    record.reads.len() == 10
}

/// Up to `k` entries of each token, spread over those that it sees; every third token has fewer.
fn choose(rows: &Rows, k: usize) -> Vec<u32> {
    let mut chosen = vec![NO_ENTRY; rows.positions.len() * k];
    for (t, (chosen, position)) in chosen.chunks_exact_mut(k).zip(&rows.positions).enumerate() {
        // Positions of padded rows are no positions.
        let seen = position.wrapping_add(1) as usize / 4;
        let count = if t % 3 == 1 { seen.min(k) / 2 } else { seen.min(k) };
        (0..count).for_each(|i| chosen[i] = (i * seen / count) as u32);
    }
    chosen
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let operands = || batch_place(call.record.op).and_then(|first| call.read.get(first..first + 4));
    let batch = operands().and_then(|operands| Operands::try_from(operands).ok());
    match (call.record.op, batch, &call.read[..], &mut launch.written[..]) {
        ("copy_slot", _, _, [rings]) => ops::copy_slot(exec, rings, rings.rows_cols().0 as u32 - 1, 0),
        ("write_ring", Some(batch), [fresh, ..], [rings]) => ops::write_ring(exec, fresh, &batch.batch(), rings),
        ("select_entries", Some(batch), [q, weights, entries, ..], [chosen]) => {
            let batch = batch.batch();
            let pages = batch.page_tables.rows_cols().1;
            let spec = SelectSpec { ratio: ratio(entries), share: TokenShare::ALL, pages };
            ops::select_entries(exec, q, weights, entries, spec, &batch, chosen)
        }
        ("sparse_attention", Some(batch), [q, kv, rings, sink, _, _, _, _, more @ ..], [out]) => {
            let visible = match more {
                [] => Visible::Nothing,
                [entries] => Visible::All { entries, ratio: ratio(entries) },
                [entries, chosen, ..] => Visible::Chosen { entries, chosen },
            };
            ops::sparse_attention(exec, q, (kv, rings), visible, sink, &batch.batch(), out)
        }
        ("compress", Some(batch), [values, ..], [_, _, _, _]) => compress(exec, call, launch, values, batch),
        _ => Err(call.unknown()),
    }
}

/// Tokens from one entry to the next, in `[pages, 128 / ratio, dim]`.
fn ratio(entries: &Tensor) -> usize {
    PAGE_TOKENS / entries.shape()[1]
}

/// In the precision of the model: low in bf16, none in f32.
fn compress(
    exec: &mut Exec,
    call: &Call<'_>,
    launch: &mut Launch,
    values: &Tensor,
    batch: Operands<'_>,
) -> Result<(), OpError> {
    let (Some(weights), Some(table)) = (&launch.compressor, &launch.rope) else { return Err(call.unknown()) };
    let mut written = std::mem::take(&mut launch.written).into_iter();
    let (Some(mut scores), Some(mut entries), Some(of_values), Some(of_scores)) =
        (written.next(), written.next(), written.next(), written.next())
    else {
        return Err(call.unknown());
    };
    let mut state = CompressorState { values: of_values, scores: of_scores };
    let (index, quantize) = (call.record.kernel == "index entries", entries.dtype() == DType::Bf16);
    let spec = CompressorSpec { ratio: ratio(&entries), index, quantize, eps: EPS };
    let tokens = (values, &mut scores);
    let done = ops::compress(exec, tokens, (weights, table), spec, &batch.batch(), &mut state, &mut entries);
    launch.written = vec![scores, entries, state.values, state.scores];
    done
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    all_written(exec, call, launch)
}
