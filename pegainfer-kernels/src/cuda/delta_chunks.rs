//! `ops::gated_delta_chunks` as chosen: the recurrence for short chains of segments; for the others, an intra-chunk
//! kernel for everything that does not need the state, all chunks at once, and an inter-chunk scan that carries the
//! state through the chunks of each chain.

use super::abi::{DeltaIntra, DeltaScan};
#[cfg(triton_kernels)]
use super::delta_chunks_triton::triton;
use super::delta_recurrent;
use super::delta_rule::check_shape;
use crate::choice::{DeltaChunks, RECURRENT_TOKENS};
use crate::delta::DeltaShape;
use crate::limits::delta_chunks::{GROUP, THREADS};
use crate::ops::DeltaInputs;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

pub(crate) fn gated_delta_chunks(
    exec: &mut Exec,
    choice: &DeltaChunks,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &mut Tensor,
    scratch: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "gated_delta_chunks";
    check_shape(op, shape)?;
    let DeltaShape { key_heads, value_heads, .. } = shape;
    if shape.group() > GROUP {
        let message = format!("{} value heads per key head: the GPU kernels take up to {GROUP}", shape.group());
        return Err(OpError { op, message });
    }
    let DeltaInputs { mixed, projected, a_log, dt_bias, segments } = *inputs;
    let (tokens, count) = (mixed.rows_cols().0, segments.rows_cols().0);
    let wanted = shape.chunk_scratch(tokens, count);
    if (scratch.bytes() as usize) < wanted {
        let message = format!("scratch has {} bytes, this step needs {wanted}", scratch.bytes());
        return Err(OpError { op, message });
    }
    if choice.has_recurrence() {
        delta_recurrent(exec, inputs, shape, states, out, RECURRENT_TOKENS)?;
    }
    let scan = match choice {
        DeltaChunks::Recurrent => return Ok(()),
        DeltaChunks::Triton { .. } => return triton(exec, inputs, shape, states, scratch, out),
        DeltaChunks::Chunked { scan, .. } => scan,
    };
    let gpu = exec.gpu()?;
    let arguments = DeltaIntra {
        mixed,
        projected,
        a_log,
        dt_bias,
        segments,
        parts: &mut *scratch,
        tokens,
        count,
        key_heads,
        value_heads,
        longest: RECURRENT_TOKENS,
    };
    let launch = DeltaIntra::gated_delta_intra.launch(gpu, op, arguments)?.early(segments).overlapped();
    // SAFETY: the op checked the shapes, the kernel checks the segments.
    unsafe { launch.run([DeltaShape::chunks(tokens, count), key_heads, 1], THREADS)? };

    let kernel = if scan.wgmma { DeltaScan::gated_delta_scan_wgmma } else { DeltaScan::gated_delta_scan_mma };
    let slots = states.rows_cols().0;
    let arguments =
        DeltaScan { mixed, parts: scratch, segments, states, out, tokens, slots, count, key_heads, value_heads };
    let launch = kernel.launch(gpu, op, arguments)?.shared(scan.shared).overlapped();
    // SAFETY: as above.
    unsafe { launch.run([scan.blocks, 1, 1], scan.threads) }
}

/// Never called: a build without the Triton kernels chooses others.
#[cfg(not(triton_kernels))]
fn triton(
    _: &mut Exec,
    _: &DeltaInputs<'_>,
    _: DeltaShape,
    _: &mut Tensor,
    _: &mut Tensor,
    _: &mut Tensor,
) -> Result<(), OpError> {
    let message = "this build has no Triton kernels: build it with --features triton".to_owned();
    Err(OpError { op: "gated_delta_chunks", message })
}
