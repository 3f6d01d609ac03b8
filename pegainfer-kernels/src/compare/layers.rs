//! `ops::decode_layers`: its operands are a whole model.

use super::batch::Tables;
use super::call::{Call, Family, Launch, all_written};
use super::case::{Case, EPS, Output, Values};
use super::operands::allocate;
use super::variant::Variant;
use crate::ops::{self, DecodeLayer, DecodeModel, DecodeScratch, DecodeState, MatrixRef};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

/// Number of a record's operands before those of the layers: inputs, outputs.
const COMMON: (usize, usize) = (8, 2);
/// Tolerances of one op that a layer may differ by.
const ROUNDINGS: f64 = 4.0;
/// Tensors of a layer.
const READ: usize = 10;

fn has(record: &OpRecord) -> bool {
    record.op == "decode_layers"
}

/// Number of layers of a call with this many inputs.
fn layers(read: &[Tensor]) -> usize {
    (read.len() - COMMON.0) / READ
}

/// The layer of these operands.
fn layer<'a>(read: &'a [Tensor], cache: &'a mut [Tensor]) -> Option<DecodeLayer<'a>> {
    let [input_norm, qkv, q_norm, k_norm, _, _, o, post_norm, gate_up, down] = read else { return None };
    let [k, v] = cache else { return None };
    let head_norms = (q_norm, k_norm);
    let [qkv, o, gate_up, down] = [qkv, o, gate_up, down].map(MatrixRef::from);
    Some(DecodeLayer { input_norm, qkv, head_norms, cache: (k, v), o, post_norm, gate_up, down })
}

/// The model with these operands; `caches` are those of its layers.
fn model<'a>(case: &Case, read: &'a [Tensor], caches: &'a mut [Tensor]) -> DecodeModel<'a> {
    let layers = read[COMMON.0..].chunks_exact(READ).zip(caches.chunks_exact_mut(2));
    DecodeModel {
        layers: layers.filter_map(|(read, cache)| layer(read, cache)).collect(),
        final_norm: &read[1],
        rope: &read[2],
        shape: case.shape,
        eps: EPS,
    }
}

fn variants(_: &OpRecord) -> Vec<Variant> {
    vec![Variant::Plain]
}

/// Rows, scratch in the order of [`DecodeScratch`], and the state.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let (rows, shape) = (call.read[0].rows_cols().0, call.case.shape);
    let [_, _, caches @ ..] = &mut launch.written[..] else { return Err(call.unknown()) };
    let blocks = caches[0].rows_cols().0;
    launch.tables = Some(Tables::new(exec, rows, (&call.record.reads[7], blocks), call.case, call.variant)?);
    let model = model(call.case, &call.read, caches);
    let (hidden, width) = model.widths();
    let widths = [hidden, shape.qkv_width(), shape.q_width(), shape.q_width(), 2 * width, width];
    for (name, columns) in ["delta", "qkv", "q", "attended", "gate_up", "activated"].into_iter().zip(widths) {
        launch.extra.push(allocate(exec, name, &[rows, columns], DType::Bf16)?);
    }
    let failed = |e: std::io::Error| OpError { op: "compare", message: e.to_string() };
    launch.state = DecodeState::new(exec, &model).map_err(failed)?;
    Ok(())
}

fn fill(exec: &mut Exec, _: &mut Call<'_>, launch: &mut Launch, values: Values) -> Result<(), OpError> {
    launch.tables.as_mut().map_or(Ok(()), |tables| tables.fill(exec, values))
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let Launch { written, extra, tables, state, .. } = launch;
    let ([residual, normed, caches @ ..], Some(tables)) = (&mut written[..], &*tables) else {
        return Err(call.unknown());
    };
    let [delta, qkv, q, attended, gate_up, activated] = &mut extra[..] else { return Err(call.unknown()) };
    let mut scratch = DecodeScratch { delta, qkv, q, attended, gate_up, activated };
    let ([positions, slots], batch) = (&tables.newest, tables.batch());
    let (mut model, at) = (model(call.case, &call.read, caches), (positions, slots));
    ops::decode_layers(exec, &mut model, state.as_mut(), at, &batch, &mut scratch, residual, normed)
}

/// Each layer adds its roundings to those before it: over two layers of Qwen3-4B's shape, two instruction sets of a CPU
/// differ by up to 0.05 of the residual's root mean square.
fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let mut outputs = all_written(exec, call, launch)?;
    let roundings = ROUNDINGS * layers(&call.read) as f64;
    outputs.iter_mut().for_each(|output| output.tolerance *= roundings);
    Ok(outputs)
}
