//! DeepSeek-V4's ops on rows: norms, streams, rounding and routing.

use super::call::{Call, Family, Launch, all_written};
use super::case::{EPS, EXACT, Output, Values};
use super::operands::{allocate, tensor, unit};
use super::variant::Variant;
use crate::cpu::deepseek_v4::kv_quant::fp8;
use crate::cpu::weights::BLOCK;
use crate::ops::deepseek_v4::{
    self as ops, HyperSpec, HyperWeights, Place, RopeTable, Rounded, Routing, RoutingSpec, packed_bytes,
    takes_packed_rows, unpacked,
};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::PLACEHOLDER;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

const OPS: [&str; 16] = [
    "resolve_ids",
    "random_codes",
    "random_numbers",
    "embed",
    "expand_streams",
    "pick_rows",
    "mean_streams",
    "add",
    "hyper_mix",
    "hyper_merge",
    "hyper_merge_mix_norm",
    "hyper_head",
    "norm",
    "round_activation",
    "rope",
    "route",
];

/// The largest distance of neighbouring e4m3 numbers, relative to them.
const E4M3_SPACING: f64 = 1.0 / 8.0;
/// Number of rotated dimensions of a head.
const ROPE_DIM: usize = 64;
/// Position in a larger matrix that is not aligned to a word of random bits.
const PLACE: Place = Place { whole: 10_003, first_row: 2, first_column: 5 };
const HYPER: HyperSpec = HyperSpec { iters: 20, eps: 1e-6, norm_eps: EPS };

fn has(record: &OpRecord) -> bool {
    OPS.contains(&record.op)
}

fn variants(_: &OpRecord) -> Vec<Variant> {
    vec![Variant::Plain]
}

/// Operands that the op takes in its own structs, and the table of hash routing.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    match call.record.op {
        "hyper_mix" | "hyper_head" => launch.hyper = Some(hyper_weights(exec, call)?),
        "hyper_merge_mix_norm" => {
            launch.hyper = Some(hyper_weights(exec, call)?);
            let [streams, _, _, out, ..] = &launch.written[..] else { return Err(call.unknown()) };
            let (rows, hidden) = out.rows_cols();
            let (shape, dtype) = ([rows, hidden], streams.dtype());
            launch.extra = vec![allocate(exec, "mixed", &shape, dtype)?];
            if takes_packed_rows(exec, dtype, hidden)? {
                launch.extra.push(allocate(exec, "packed", &[rows, packed_bytes(hidden)], DType::U8)?);
            }
        }
        "norm" => {
            let [out, _low] = &launch.written[..] else { return Ok(()) };
            let (rows, hidden) = out.rows_cols();
            if takes_packed_rows(exec, out.dtype(), hidden)? {
                launch.extra = vec![allocate(exec, "packed", &[rows, packed_bytes(hidden)], DType::U8)?];
            }
        }
        "rope" => launch.rope = Some(RopeTable::new(exec, ROPE_DIM, 10_000.0, None)?),
        "route" if is_hash_routed(call) => {
            let ([logits, ids], [experts, _]) = (&call.read[..], &launch.written[..]) else {
                return Err(call.unknown());
            };
            let (rows, k) = (ids.elements(), experts.rows_cols().1);
            let mut table = allocate(exec, "table", &[rows, k], DType::U32)?;
            let count = logits.rows_cols().1;
            let chosen: Vec<u32> = (0..rows * k).map(|i| ((i / k * 7 + i % k) % count) as u32).collect();
            exec.fill_rows(&mut table, &chosen)?;
            launch.extra = vec![table];
        }
        _ => {}
    }
    Ok(())
}

/// Mixing values of a few units, as trained weights give: of larger ones the sigmoids and the softmax are 0 or 1.
fn hyper_weights(exec: &mut Exec, call: &Call<'_>) -> Result<HyperWeights, OpError> {
    let [_, function, base, scale, ..] = &call.record.reads[..] else { return Err(call.unknown()) };
    let size = 4.0 / (function.shape[1] as f32).sqrt();
    let mut function = tensor(exec, function, call.case, 1)?;
    let (base, scale) = (tensor(exec, base, call.case, 2)?, tensor(exec, scale, call.case, 3)?);
    let elements = function.elements();
    exec.write(&mut function, 0..elements, |first, out: &mut [f32]| {
        out.iter_mut().enumerate().for_each(|(i, v)| *v = size * unit(1, first + i));
    })?;
    Ok(HyperWeights { function, base, scale })
}

/// True if a call of `route` chooses by token ids, which are u32.
fn is_hash_routed(call: &Call<'_>) -> bool {
    call.read[1].dtype() == DType::U32
}

/// Biases with few distinct values, which leave ties.
fn fill(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch, _: Values) -> Result<(), OpError> {
    match call.record.op {
        // Every other id is a placeholder, one of them for a sample that does not exist.
        "resolve_ids" => {
            let ids = &mut launch.written[0];
            let id = |i: u32| if i.is_multiple_of(2) { PLACEHOLDER | (i / 2) } else { 7 * i };
            let values: Vec<u32> = (0..ids.elements() as u32).map(id).collect();
            exec.fill_rows(ids, &values)
        }
        "rope" => {
            let Some(positions) = call.read.last_mut() else { return Err(call.unknown()) };
            let values: Vec<u32> = (0..positions.elements() as u32).map(|i| (i * 7919 + 3) % 1_000_003).collect();
            exec.fill_rows(positions, &values)
        }
        "route" if !is_hash_routed(call) => {
            let bias = &mut call.read[1];
            let values: Vec<f32> = (0..bias.elements()).map(|i| (i % 3) as f32 / 16.0).collect();
            exec.fill_rows(bias, &values)
        }
        _ => Ok(()),
    }
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let (read, written) = (&call.read[..], &mut launch.written[..]);
    match (call.record.op, read, written) {
        // The first id belongs to another rank.
        ("embed", [ids, table], [out]) => ops::embed(exec, ids, table, 1, out),
        ("expand_streams", [x], [streams]) => ops::expand_streams(exec, x, streams),
        ("pick_rows", [x, rows], [out]) => ops::pick_rows(exec, x, rows, out),
        // The last of the layers whose streams are in the output.
        ("mean_streams", [streams, _], [out]) => {
            ops::mean_streams(exec, streams, 4 * out.rows_cols().1 / streams.rows_cols().1 - 1, out)
        }
        ("add", [x, _], [out]) => ops::add(exec, x, out),
        ("hyper_merge", [_, f, post, comb], [streams]) => ops::hyper_merge(exec, f, (post, comb), streams),
        ("norm", [x, weight], [out]) => ops::norm(exec, x, weight, EPS, out, None),
        ("norm", [x, weight], [out, low]) => {
            let low = Rounded { values: low, packed: launch.extra.first_mut() };
            ops::norm(exec, x, weight, EPS, out, Some(low))
        }
        ("rope", [_, positions], [x]) => match &launch.rope {
            Some(table) => ops::rope(exec, x, positions, table, true),
            None => Err(call.unknown()),
        },
        ("round_activation", [_], [x]) => ops::round_activation(exec, x),
        ("route", [logits, by], [experts, weights]) => {
            let routing = match launch.extra.first() {
                Some(table) => Routing::Hash { table, ids: by },
                None => Routing::Learned { bias: by },
            };
            ops::route(exec, logits, routing, RoutingSpec { scale: 1.5 }, (experts, weights))
        }
        ("resolve_ids", [previous, _], [ids]) => ops::resolve_ids(exec, previous, ids),
        ("random_codes", [], [out]) => ops::random_codes(exec, 3, PLACE, (0xbf, 1), out),
        ("random_numbers", [], [out]) => ops::random_numbers(exec, 3, PLACE, 0.5, out),
        (op, read, written) => match (op, read, written, &launch.hyper) {
            ("hyper_mix", [streams, ..], [mixed, post, comb], Some(weights)) => {
                ops::hyper_mix(exec, streams, weights, HYPER, mixed, (post, comb))
            }
            ("hyper_head", [streams, ..], [out], Some(weights)) => ops::hyper_head(exec, streams, weights, HYPER, out),
            ("hyper_merge_mix_norm", [_, _, _, _, f, _, _, norm], [streams, post, comb, out, low @ ..], Some(w)) => {
                let [mixed, packed @ ..] = &mut launch.extra[..] else { return Err(call.unknown()) };
                let (merged, mixing, norm) = ((f, streams), (post, comb), (norm, EPS));
                let low = low.first_mut().map(|values| Rounded { values, packed: packed.first_mut() });
                let outputs = (out, low);
                ops::hyper_merge_mix_norm(exec, merged, (w, HYPER), mixing, norm, mixed, outputs)
            }
            _ => Err(call.unknown()),
        },
    }
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let mut outputs = all_written(exec, call, launch)?;
    if let ("norm", [out, low]) | ("hyper_merge_mix_norm", [_, _, _, out, low]) = (call.record.op, &mut outputs[..]) {
        let mut rounded = out.values.clone();
        rounded.chunks_mut(out.row).for_each(|row| fp8(row, BLOCK));
        let errors = unrounded(low, &rounded);
        outputs.push(errors);
        let (packed, low) = match call.record.op {
            "norm" => (launch.extra.first(), &outputs[1]),
            _ => (launch.extra.get(1), &outputs[4]),
        };
        outputs.push(packing_errors(exec, packed, low)?);
    }
    Ok(outputs)
}

/// Differences between packed rows, if any, and the values that they pack; must be zero.
pub(super) fn packing_errors(exec: &Exec, packed: Option<&Tensor>, low: &Output) -> Result<Output, OpError> {
    let mut values = vec![0.0; low.values.len()];
    if let Some(packed) = packed {
        let mut bytes = vec![0; packed.elements()];
        exec.read(packed, 0, &mut bytes)?;
        values = unpacked(&bytes, low.row);
        values.iter_mut().zip(&low.values).for_each(|(value, low)| *value -= low);
    }
    Ok(Output { tolerance: EXACT, row: low.row, values })
}

/// The first `at` columns of a matrix, and the others.
pub(super) fn split(whole: &Output, at: usize) -> [Output; 2] {
    [0..at, at..whole.row].map(|part| {
        let rows = whole.values.chunks(whole.row).flat_map(|row| &row[part.clone()]);
        Output { tolerance: whole.tolerance, row: part.len(), values: rows.copied().collect() }
    })
}

/// FP8 values of sums in a different order, which may have been rounded differently. Also returns their difference from
/// the device's own rounded values, which must be zero.
pub(super) fn unrounded(low: &mut Output, rounded: &[f32]) -> Output {
    low.tolerance = E4M3_SPACING;
    let values = low.values.iter().zip(rounded).map(|(a, b)| a - b).collect();
    Output { tolerance: EXACT, row: low.row, values }
}
