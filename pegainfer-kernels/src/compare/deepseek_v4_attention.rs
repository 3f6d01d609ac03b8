//! DeepSeek-V4's compressors, indexer, attention and rings, over ragged batches.

use super::call::{Call, Family, Launch, all_written};
use super::case::{EPS, Output, Values};
use super::deepseek_v4::{packing_errors, split, unrounded};
use super::deepseek_v4_batch::{Operands, Rows};
use super::operands::{allocate, input_seed, tensor, unit};
use super::variant::Variant;
use crate::cpu::deepseek_v4::kv_quant::{KEY_GROUP, fp8};
use crate::cpu::weights::BLOCK;
use crate::ops::deepseek_v4::{
    self as ops, CompressorSpec, CompressorState, CompressorWeights, KeptTokens, LatentOutputs, Latents, NO_ENTRY,
    NewEntries, PAGE_TOKENS, Queries, RaggedBatch, RingTable, RopeTable, Rounded, SPLIT_TOKENS, SelectSpec, Split,
    TokenShare, Visible, packed_bytes, split_bytes, takes_packed_rows, unpacked,
};
use crate::rotary::Yarn;
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::rng;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

/// Dimensions of an entry that are rotated.
const ROPE_DIM: usize = 64;
const YARN: Yarn = Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_context: 65_536.0, truncate: true };

/// Index of the batch among an op's inputs; `None` for ops without one.
fn batch_place(record: &OpRecord) -> Option<usize> {
    match record.op {
        "attention_queries" => Some(if has_index(record) { 2 } else { 1 }),
        "write_ring" => Some(1),
        "select_entries" => Some(3),
        "attention_latents" | "sparse_attention" => Some(4),
        _ => None,
    }
}

/// True if a call of `attention_queries` has queries of an indexer: these and the others, the batch, and three operands
/// of each of two compressors.
fn has_index(record: &OpRecord) -> bool {
    record.reads.len() == 2 + 4 + 2 * 3
}

fn has(record: &OpRecord) -> bool {
    record.op == "copy_slots" || batch_place(record).is_some()
}

/// Every third row may pad the step.
fn variants(record: &OpRecord) -> Vec<Variant> {
    let slots = batch_place(record).and_then(|first| record.reads.get(first + 2));
    if slots.is_some_and(|slots| slots.shape[0] > 2) {
        vec![Variant::Plain, Variant::Padded]
    } else {
        vec![Variant::Plain]
    }
}

/// The operands that ops take in structs of their own, packed rows, and the packed output of attention.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    match call.record.op {
        "select_entries" | "write_ring" => return Ok(()),
        "copy_slots" => {
            let rings: Vec<&Tensor> = launch.written.iter().collect();
            launch.rings = Some(RingTable::new(exec, &rings)?);
            return Ok(());
        }
        _ => {}
    }
    launch.rope = Some(RopeTable::new(exec, ROPE_DIM, 160_000.0, Some(YARN))?);
    let small = match call.record.op {
        "attention_latents" => call.record.reads[8..].chunks(6).map(|of| (&of[2], Some(&of[3]))).collect(),
        "attention_queries" => {
            let first = if has_index(call.record) { 6 } else { 5 };
            call.record.reads[first..].chunks(3).map(|of| (&of[2], None)).collect()
        }
        _ => Vec::new(),
    };
    for (bias, norm) in small {
        let norm = match norm {
            Some(norm) => tensor(exec, norm, call.case, 3)?,
            None => allocate(exec, "norm", &[1], DType::Bf16)?,
        };
        launch.compressors.push(CompressorWeights { position_bias: tensor(exec, bias, call.case, 2)?, norm });
    }
    let out = &launch.written[0];
    let (tokens, width, dtype) = (out.rows_cols().0, out.rows_cols().1, out.dtype());
    match call.record.op {
        "attention_latents" if takes_packed_rows(exec, dtype, width)? => {
            launch.extra = vec![allocate(exec, "packed", &[tokens, packed_bytes(width)], DType::U8)?];
        }
        "sparse_attention" if tokens <= SPLIT_TOKENS && takes_packed_rows(exec, dtype, out.shape()[2])? => {
            let (groups, columns) = groups(out);
            launch.extra = vec![allocate(exec, "split", &[tokens, split_bytes(groups, columns)], DType::U8)?];
        }
        _ => {}
    }
    Ok(())
}

/// Groups of heads `[tokens, heads, dim]`, two if their number is even, and the columns of a group.
fn groups(out: &Tensor) -> (usize, usize) {
    let (heads, dim) = (out.shape()[1], out.shape()[2]);
    let groups = if heads.is_multiple_of(2) { 2 } else { 1 };
    (groups, heads * dim / groups)
}

/// Fills the batch, and values that matter: scores of entries that are exact in f32, so that all devices choose alike,
/// with many ties; attention that prefers some keys.
fn fill(exec: &mut Exec, call: &mut Call<'_>, _: &mut Launch, values: Values) -> Result<(), OpError> {
    let Some(first) = batch_place(call.record) else { return Ok(()) };
    // Pages of the cache that the batch is in.
    let pages = match call.record.op {
        // The entries of both compressors are in the same pages.
        "attention_latents" if call.record.reads.len() > 8 => call.record.writes.last(),
        "select_entries" => call.record.reads.get(2),
        "sparse_attention" => call.record.reads.get(8),
        _ => None,
    };
    let pages = pages.map(|operand| operand.shape[0]);
    let Some(operands) = call.read.get_mut(first..first + 4) else { return Err(call.unknown()) };
    let rows = match is_of_blocks(call.record) {
        true => Rows::of_blocks(operands, call.case, (call.variant, values)),
        false => Rows::new(operands, pages, call.case, (call.variant, values)),
    };
    let Some(rows) = rows else { return Err(call.unknown()) };
    rows.fill(exec, operands)?;
    let seed = input_seed(values);
    match (call.record.op, &mut call.read[..]) {
        ("select_entries", [q, weights, entries, ..]) => {
            let small = |seed: u64, i: usize| (rng::bits(seed, i as u64) % 5) as f32 - 2.0;
            write(exec, q, |i| small(seed, i))?;
            write(exec, weights, |i| small(seed + 1, i) / 4.0)?;
            write(exec, entries, |i| small(seed + 2, i))
        }
        ("sparse_attention", [q, kv, _, sink, .., last]) => {
            if is_of_blocks(call.record) {
                // All tokens of a block have the key of its anchor, which goes into the ring.
                let (dim, block) = (kv.rows_cols().1, last.rows_cols().1);
                write(exec, kv, |i| unit(seed + 1, i / dim / block * dim + i % dim))?;
            }
            write(exec, q, |i| 8.0 * unit(seed, i))?;
            write(exec, sink, |i| 4.0 * unit(3, i))?;
            if chosen_entries(call.record) {
                let k = last.rows_cols().1;
                let chosen = if is_of_blocks(call.record) { own_blocks(last.rows_cols()) } else { choose(&rows, k) };
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

/// True if a call of `sparse_attention` has a list of chosen entries, after the entries.
fn chosen_entries(record: &OpRecord) -> bool {
    record.reads.len() == 10
}

/// True if a call of `sparse_attention` is over blocks (DSpark), with entries of one token each.
fn is_of_blocks(record: &OpRecord) -> bool {
    let entries = record.reads.get(8).filter(|_| record.op == "sparse_attention" && chosen_entries(record));
    entries.is_some_and(|entries| entries.shape[1] == PAGE_TOKENS)
}

/// For each token, the `k` tokens of its block.
fn own_blocks((tokens, k): (usize, usize)) -> Vec<u32> {
    (0..tokens * k).map(|i| (i / k / k * k + i % k) as u32).collect()
}

/// Up to `k` entries of each token, spread over the visible ones; every third token has fewer.
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
    let operands = || batch_place(call.record).and_then(|first| call.read.get(first..first + 4));
    let batch = operands().and_then(|operands| Operands::try_from(operands).ok());
    match (call.record.op, batch, &call.read[..], &mut launch.written[..]) {
        ("copy_slots", _, _, rings) => {
            let mut rings: Vec<&mut Tensor> = rings.iter_mut().collect();
            let (Some(table), [first, ..]) = (&launch.rings, &rings[..]) else { return Err(call.unknown()) };
            let last = first.rows_cols().0 as u32 - 1;
            ops::copy_slots(exec, table, &mut rings, last, 0)
        }
        ("write_ring", Some(batch), [fresh, ..], [rings]) => ops::write_ring(exec, fresh, &batch.batch(), rings),
        ("select_entries", Some(batch), [q, weights, entries, ..], [chosen]) => {
            let batch = batch.batch();
            let pages = batch.page_tables.rows_cols().1;
            let spec = SelectSpec { ratio: ratio(entries), share: TokenShare::ALL, pages };
            ops::select_entries(exec, q, weights, entries, spec, &batch, chosen)
        }
        ("sparse_attention", Some(batch), [q, kv, _, sink, _, _, _, _, more @ ..], [out, rings]) => {
            let visible = match more {
                [] => Visible::Nothing,
                [entries] => Visible::All { entries, ratio: ratio(entries) },
                [entries, chosen, ..] => Visible::Chosen { entries, chosen },
            };
            let Some(table) = &launch.rope else { return Err(call.unknown()) };
            let (_, columns) = groups(out);
            let split = launch.extra.first_mut().map(|packed| Split { packed, columns });
            ops::sparse_attention(exec, q, (kv, rings), visible, (sink, table), &batch.batch(), (out, split))
        }
        ("attention_latents", Some(batch), ..) => latents(exec, call, launch, &batch.batch()),
        ("attention_queries", Some(batch), ..) => queries(exec, call, launch, &batch.batch()),
        _ => Err(call.unknown()),
    }
}

/// Tokens from one entry to the next, in `[pages, 128 / ratio, dim]`.
fn ratio(entries: &Tensor) -> usize {
    PAGE_TOKENS / entries.shape()[1]
}

/// Compressors of the layer and of its indexer, in the precision of the model: rounded in bf16, not in f32.
fn spec(index: bool, ratio: usize, dtype: DType) -> CompressorSpec {
    CompressorSpec { ratio, index, quantize: dtype == DType::Bf16, eps: EPS }
}

fn latents(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch, batch: &RaggedBatch<'_>) -> Result<(), OpError> {
    let ([x, weight, keys, key_weight, _, _, _, _, rest @ ..], Some(table)) = (&call.read[..], &launch.rope) else {
        return Err(call.unknown());
    };
    let dtype = x.dtype();
    let mut written = launch.written.iter_mut();
    let Some(queries) = written.next() else { return Err(call.unknown()) };
    let has_low = call.record.writes.len() == 3 + rest.len() / 6;
    let low = if has_low { written.next() } else { None };
    let rounded = low.map(|values| Rounded { values, packed: launch.extra.first_mut() });
    let Some(kv) = written.next() else { return Err(call.unknown()) };
    let mut new =
        rest.chunks(6).zip(&launch.compressors).zip(written).enumerate().map(|(i, ((of, weights), entries))| {
            let spec = spec(i == 1, ratio(entries), dtype);
            NewEntries { tokens: (&of[0], &of[1]), weights, spec, rings: [&of[4], &of[5]], entries }
        });
    let entries = [new.next(), new.next()];
    let quantize = dtype == DType::Bf16;
    let latents = Latents { queries: (x, weight), keys: (keys, key_weight), table, eps: EPS, quantize };
    ops::attention_latents(exec, latents, batch, LatentOutputs { queries, rounded, keys: kv, entries })
}

fn queries(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch, batch: &RaggedBatch<'_>) -> Result<(), OpError> {
    let Some(table) = &launch.rope else { return Err(call.unknown()) };
    let mut written = std::mem::take(&mut launch.written).into_iter();
    let Some(mut heads) = written.next() else { return Err(call.unknown()) };
    let (first, dtype) = (if has_index(call.record) { 6 } else { 5 }, heads.dtype());
    let mut index = if has_index(call.record) { written.next() } else { None };
    let mut states = Vec::new();
    while let Some((values, scores)) = written.next().zip(written.next()) {
        states.push(CompressorState { values, scores });
    }
    let mut kept = call.read[first..].chunks(3).zip(&launch.compressors).zip(&mut states).enumerate().map(
        |(i, ((of, weights), state))| {
            let spec = spec(i == 1, weights.position_bias.rows_cols().0, dtype);
            KeptTokens { tokens: (&of[0], &of[1]), weights, spec, state }
        },
    );
    let kept = [kept.next(), kept.next()];
    let queries = Queries { heads: &mut heads, index: index.as_mut(), kept };
    let done = ops::attention_queries(exec, queries, table, batch, (EPS, dtype == DType::Bf16));
    let states = states.into_iter().flat_map(|state| [state.values, state.scores]);
    launch.written = [heads].into_iter().chain(index).chain(states).collect();
    done
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let mut outputs = all_written(exec, call, launch)?;
    match call.record.op {
        "sparse_attention" => {
            // Rotation passes a difference in rounding to the other value of the pair, which may be much smaller.
            outputs[0].tolerance *= 2.0;
            let mut packed = Output { values: outputs[0].values.clone(), ..outputs[0] };
            if let Some(split) = launch.extra.first() {
                let (_, columns) = groups(&launch.written[0]);
                let mut bytes = vec![0; split.elements()];
                exec.read(split, 0, &mut bytes)?;
                let parts = unpacked(&bytes, columns);
                packed.values =
                    parts.chunks(2 * columns).flat_map(|two| (0..columns).map(|i| two[i] + two[columns + i])).collect();
            }
            outputs.push(packed);
        }
        "attention_latents" if call.read[0].dtype() == DType::Bf16 => {
            let entries = outputs.split_off(3);
            let [out, low, keys] = &mut outputs[..] else { return Err(call.unknown()) };
            let mut rounded = out.values.clone();
            rounded.chunks_mut(out.row).for_each(|row| fp8(row, BLOCK));
            let errors = unrounded(low, &rounded);
            let packing = packing_errors(exec, launch.extra.first(), low)?;
            // Rounded keys are rounded to themselves.
            let [mut still, rotated] = split(keys, keys.row - ROPE_DIM);
            let mut again = still.values.clone();
            again.chunks_mut(still.row).for_each(|row| fp8(row, KEY_GROUP));
            let key_errors = unrounded(&mut still, &again);
            outputs.truncate(2);
            outputs.extend([errors, packing, still, rotated, key_errors]);
            outputs.extend(entries);
        }
        _ => {}
    }
    Ok(outputs)
}
