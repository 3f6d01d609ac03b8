//! Ops of dense layers: embedding, norms and products; and dummy weights.

use super::{Call, EPS, EXACT, Output, allocate};
use crate::ops::{self, PLACEHOLDER};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError};

/// Calls the op, if it is one of these.
pub(super) fn run(exec: &mut Exec, call: &mut Call<'_>) -> Result<Option<Vec<Output>>, OpError> {
    match (call.record.op, &mut call.read[..], &mut call.written[..]) {
        ("embedding", [ids, table, previous], [out]) => {
            // Every other token is one that the previous step drew.
            let (tokens, drawn) = (ids.elements() as u32, previous.elements() as u32);
            let token = |i: u32| if i.is_multiple_of(2) { i } else { PLACEHOLDER | (i % drawn) };
            exec.fill_rows(ids, &(0..tokens).map(token).collect::<Vec<u32>>())?;
            ops::embedding(exec, ids, previous, table, out)?;
        }
        ("gather_rows", [x, rows], [out]) => ops::gather_rows(exec, x, rows, out)?,
        ("rms_norm", [x, weight], [out]) => ops::rms_norm(exec, x, weight, EPS, out)?,
        ("linear_add_norm", [x, w, _, norm], [residual, out]) => {
            let mut delta = allocate(exec, "delta", out.shape(), DType::Bf16)?;
            ops::linear_add_norm(exec, x, w, residual, norm, EPS, &mut delta, out)?;
        }
        ("linear", [x, w], [out]) => ops::linear(exec, x, w, out)?,
        ("linear_swiglu", [x, w], [out]) => {
            let mut gate_up = allocate(exec, "gate_up", &[x.rows_cols().0, w.rows_cols().0], DType::Bf16)?;
            ops::linear_swiglu(exec, x, w, &mut gate_up, out)?;
        }
        ("uniform", [], [out]) => {
            ops::uniform(exec, 5, 0.02, out)?;
            let exact = |output| Output { tolerance: EXACT, ..output };
            return Ok(Some(call.outputs(exec)?.into_iter().map(exact).collect()));
        }
        _ => return Ok(None),
    }
    call.outputs(exec).map(Some)
}
