//! `ops::decode_layers`: its operands are a whole model.

use super::batch::Rows;
use super::{Call, EPS, Output, allocate, tensor};
use crate::ops::{self, DecodeLayer, DecodeModel, DecodeScratch, DecodeState};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Operands of a record before those of the layers: read, and written.
const COMMON: (usize, usize) = (8, 2);
/// Tolerances of one op that a layer may differ by.
const ROUNDINGS: f64 = 4.0;
/// Tensors of a layer.
const READ: usize = 10;

/// The layer of these operands.
fn layer<'a>(read: &'a [Tensor], cache: &'a mut [Tensor]) -> Option<DecodeLayer<'a>> {
    let [input_norm, qkv, q_norm, k_norm, _, _, o, post_norm, gate_up, down] = read else { return None };
    let [k, v] = cache else { return None };
    let head_norms = (q_norm, k_norm);
    Some(DecodeLayer { input_norm, qkv, head_norms, cache: (k, v), o, post_norm, gate_up, down })
}

/// Calls the op, if it is this one.
pub(super) fn run(exec: &mut Exec, call: &mut Call<'_>) -> Result<Option<Vec<Output>>, OpError> {
    let Call { record, case, read, written } = call;
    if record.op != "decode_layers" {
        return Ok(None);
    }
    let layers = (read.len() - COMMON.0) / READ;
    let (common, caches) = written.split_at_mut(COMMON.1);
    let [residual, normed] = common else { return Ok(None) };
    let (rows, blocks) = (residual.rows_cols().0, caches[0].rows_cols().0);
    let tables = Rows::new(rows, &record.reads[7], blocks, case);
    let ((positions, slots), tables) = (tables.newest(exec)?, tables.upload(exec)?);
    let (read_layers, caches) = (read[COMMON.0..].chunks_exact(READ), caches.chunks_exact_mut(2));
    let mut model = DecodeModel {
        layers: read_layers.zip(caches).filter_map(|(read, cache)| layer(read, cache)).collect(),
        final_norm: &read[1],
        rope: &read[2],
        shape: case.shape,
        eps: EPS,
    };
    let (hidden, width) = model.widths();
    let mut room = |name: &str, columns: usize| allocate(exec, name, &[rows, columns], DType::Bf16);
    let mut scratch = DecodeScratch {
        delta: &mut room("delta", hidden)?,
        qkv: &mut room("qkv", case.shape.qkv_width())?,
        q: &mut room("q", case.shape.q_width())?,
        attended: &mut room("attended", case.shape.q_width())?,
        gate_up: &mut room("gate_up", 2 * width)?,
        activated: &mut room("activated", width)?,
    };
    let failed = |e: std::io::Error| OpError { op: "compare", message: e.to_string() };
    let mut state = DecodeState::new(exec, &model).map_err(failed)?;
    let at = (&positions, &slots);
    // Twice, because the second call finds what the first one left in the state.
    for _ in 0..2 {
        *residual = tensor(exec, &record.reads[0], case, 0)?;
        let (state, batch) = (state.as_mut(), tables.batch());
        ops::decode_layers(exec, &mut model, state, at, &batch, &mut scratch, residual, normed)?;
    }
    // Each layer adds its roundings to those before it: over two layers of Qwen3-4B's shape, two instruction sets of a CPU
    // differ by up to 0.05 of the residual's root mean square.
    let add = |output: Output| Output { tolerance: ROUNDINGS * output.tolerance * layers as f64, ..output };
    Ok(Some(call.outputs(exec)?.into_iter().map(add).collect()))
}
