//! `ops::gated_delta_chunks`: a kernel for what the chunks need besides the state, all at once, and one that walks through
//! the chunks of each chain of segments.

use super::delta_rule::delta_recurrent;
use super::images;
use crate::delta::DeltaShape;
use crate::ops::DeltaInputs;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// As in csrc/gated_delta_chunks.cuh: elements of a head, and most value heads of a key head.
const DIM: usize = 128;
const MAX_GROUP: usize = 4;
/// As in csrc/gated_delta_parts.cu.
const PARTS_THREADS: usize = 128;
/// As in csrc/gated_delta_walk.cu: rows of the state that a block has, and threads that fetch.
const ROWS: usize = 32;
const FETCHERS: usize = 64;

/// Tokens of a chain that the recurrence takes: the decoding rows of a mixed step, and ends of prompts.
const RECURRENT: usize = 15;

/// A kernel that walks: name, threads, bytes of `Shared` in csrc/gated_delta_walk.cu.
type Walk = (&'static str, usize, usize);
/// With warps for the outputs beside those that carry the state.
const SPLIT: Walk = ("gated_delta_walk_split", FETCHERS + 4 * ROWS, 171_392);
/// For GPUs with less shared memory.
const WHOLE: Walk = ("gated_delta_walk", FETCHERS + 2 * ROWS, 97_904);

fn walk(shared_memory: usize) -> Walk {
    if shared_memory >= SPLIT.2 { SPLIT } else { WHOLE }
}

pub(crate) fn gated_delta_chunks(
    exec: &mut Exec,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &mut Tensor,
    scratch: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let op = "gated_delta_chunks";
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
    if (key_dim, value_dim) != (DIM, DIM) || shape.group() > MAX_GROUP {
        let message = format!(
            "heads of {key_dim} and {value_dim}, {} to a key head: the GPU kernels are built for {DIM}, {DIM} and up to \
             {MAX_GROUP}",
            shape.group()
        );
        return Err(OpError { op, message });
    }
    let DeltaInputs { mixed, projected, a_log, dt_bias, segments } = *inputs;
    let (tokens, count) = (mixed.rows_cols().0, segments.rows_cols().0);
    let room = shape.chunk_scratch(tokens, count);
    if (scratch.bytes() as usize) < room {
        let message = format!("scratch has {} bytes, this step wants {room}", scratch.bytes());
        return Err(OpError { op, message });
    }
    if tokens == 0 {
        return Ok(());
    }
    if count > 1 || tokens <= RECURRENT {
        delta_recurrent(exec, inputs, shape, states, out, RECURRENT)?;
    }
    let gpu = exec.gpu()?;
    let launch = gpu.launch(op, &images::GATED_DELTA_PARTS, "gated_delta_parts")?.input(mixed).input(projected);
    let launch = launch.input(a_log).input(dt_bias).input(segments).output(scratch);
    let launch = launch.u32(tokens).u32(count).u32(key_heads).u32(value_heads).u32(RECURRENT).overlapped();
    // SAFETY: matches csrc/gated_delta_parts.cu; the op checked the shapes, the kernel checks the segments.
    unsafe { launch.run([DeltaShape::chunks(tokens, count), key_heads, 1], PARTS_THREADS)? };

    let (kernel, threads, shared) = walk(gpu.shared_memory());
    let launch = gpu.launch(op, &images::GATED_DELTA_WALK, kernel)?.input(mixed).input(scratch).input(segments);
    let launch = launch.output(states).output(out).u32(tokens).u32(states.rows_cols().0).u32(count);
    let launch = launch.u32(key_heads).u32(value_heads).u32(RECURRENT).shared(shared).overlapped();
    // SAFETY: matches csrc/gated_delta_walk.cu; as above.
    unsafe { launch.run([value_heads * (DIM / ROWS), count, 1], threads) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_has_the_shared_memory() {
        // Of a block, in KiB: compute capability 8.0, 8.6, 9.0, 10.0, 12.0.
        for (kib, expected) in [(163, WHOLE), (99, WHOLE), (227, SPLIT), (227, SPLIT), (99, WHOLE)] {
            let (kernel, _, shared) = walk(kib << 10);
            assert_eq!(kernel, expected.0);
            assert!(shared <= kib << 10);
        }
    }
}
