//! Ops of dense layers: embedding, norms and GEMMs; and dummy weights.

use super::call::{Call, Family, Launch, all_written};
use super::case::{EPS, EXACT, Output, Values};
use super::operands::allocate;
use super::variant::Variant;
use crate::ops::{self, PLACEHOLDER};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

/// Tolerance of sums of weights that a GPU may round to bf16.
const WIDENED: f64 = 1.0 / 64.0;
/// The same of SwiGLU: an error of the gate counts times the other half.
const GATED: f64 = 1.0 / 32.0;

const OPS: [&str; 10] = [
    "embedding",
    "gather_rows",
    "rms_norm",
    "add_rms_norm",
    "linear_add_norm",
    "linear",
    "linear_swiglu",
    "swiglu",
    "quantize_fp8",
    "uniform",
];

fn has(record: &OpRecord) -> bool {
    OPS.contains(&record.op)
}

fn variants(_: &OpRecord) -> Vec<Variant> {
    vec![Variant::Plain]
}

/// Scratch for the intermediate results of fused ops.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let (name, shape) = match (call.record.op, &call.read[..], &launch.written[..]) {
        ("linear_add_norm", _, [_, out]) => ("delta", out.shape().to_vec()),
        ("linear_swiglu", [x, _], [out]) => ("gate_up", vec![x.rows_cols().0, 2 * out.rows_cols().1]),
        _ => return Ok(()),
    };
    launch.extra = vec![allocate(exec, name, &shape, DType::Bf16)?];
    Ok(())
}

/// Every other token comes from the previous step.
fn fill(exec: &mut Exec, call: &mut Call<'_>, _: &mut Launch, values: Values) -> Result<(), OpError> {
    let ("embedding", [ids, _, previous]) = (call.record.op, &mut call.read[..]) else { return Ok(()) };
    let (tokens, drawn) = (ids.elements() as u32, previous.elements() as u32);
    let first = u32::from(values == Values::Earlier);
    let token = |i: u32| if (i + first).is_multiple_of(2) { i } else { PLACEHOLDER | (i % drawn) };
    exec.fill_rows(ids, &(0..tokens).map(token).collect::<Vec<u32>>())
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    match (call.record.op, &call.read[..], &mut launch.written[..], &mut launch.extra[..]) {
        ("embedding", [ids, table, previous], [out], _) => ops::embedding(exec, ids, previous, table, out),
        ("gather_rows", [x, rows], [out], _) => ops::gather_rows(exec, x, rows, out),
        ("rms_norm", [x, weight], [out], _) => ops::rms_norm(exec, x, weight, EPS, out),
        ("add_rms_norm", [x, _, norm], [residual, out], _) => ops::add_rms_norm(exec, x, residual, norm, EPS, out),
        ("linear_add_norm", [x, w, _, norm], [residual, out], [delta]) => {
            ops::linear_add_norm(exec, x, call.weight(w), residual, norm, EPS, delta, out)
        }
        ("linear", [x, w], [out], _) => ops::linear(exec, x, call.weight(w), out),
        ("linear_swiglu", [x, w], [out], [gate_up]) => ops::linear_swiglu(exec, x, call.weight(w), gate_up, out),
        ("swiglu", [gate_up], [out], _) => ops::swiglu(exec, gate_up, out),
        ("quantize_fp8", [w], [codes, scales], _) => ops::quantize_fp8(exec, w, codes, scales),
        ("uniform", [], [out], _) => ops::uniform(exec, 5, 0.02, out),
        _ => Err(call.unknown()),
    }
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let mut outputs = all_written(exec, call, launch)?;
    if matches!(call.record.op, "quantize_fp8" | "uniform") {
        outputs.iter_mut().for_each(|output| output.tolerance = EXACT);
    }
    if let (op @ ("linear" | "linear_swiglu"), [_, w]) = (call.record.op, &call.read[..])
        && call.weight(w).is_quantized()
    {
        let least = if op == "linear" { WIDENED } else { GATED };
        outputs.iter_mut().for_each(|output| output.tolerance = output.tolerance.max(least));
    }
    Ok(outputs)
}
