//! `ops::gated_delta_chunks`: the recurrence for short chains of segments; for the others, a kernel for what their chunks
//! need besides the state, all at once, and one that walks through the chunks of each chain.

use super::delta_rule::check_shape;
use super::{delta_recurrent, images};
use crate::delta::DeltaShape;
use crate::ops::DeltaInputs;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Most tokens of a chain that the recurrence takes: decode rows beside prompts.
const SHORT: usize = 16;
/// As in csrc/gated_delta_parts.cu: most value heads per key head.
const MAX_GROUP: usize = 4;
const PARTS_THREADS: usize = 128;
/// The only GPUs that run code for sm_90a.
const HOPPER: (i32, i32) = (9, 0);

/// A kernel that walks.
#[derive(Debug, PartialEq, Eq)]
struct Walk {
    name: &'static str,
    /// Blocks that share a head.
    slices: usize,
    /// Blocks that a multiprocessor holds.
    resident: usize,
    threads: usize,
    /// Bytes of `Shared` in csrc/gated_delta_fetch.cuh.
    shared: usize,
}

fn walk(capability: (i32, i32)) -> Walk {
    if capability == HOPPER {
        Walk { name: "gated_delta_walk_hopper", slices: 2, resident: 1, threads: 384, shared: 208_272 }
    } else {
        Walk { name: "gated_delta_walk", slices: 4, resident: 2, threads: 128, shared: 97_920 }
    }
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
    check_shape(op, shape)?;
    let DeltaShape { key_heads, value_heads, .. } = shape;
    if shape.group() > MAX_GROUP {
        let message = format!("{} value heads per key head: the GPU kernels take up to {MAX_GROUP}", shape.group());
        return Err(OpError { op, message });
    }
    let DeltaInputs { mixed, projected, a_log, dt_bias, segments } = *inputs;
    let (tokens, count) = (mixed.rows_cols().0, segments.rows_cols().0);
    let room = shape.chunk_scratch(tokens, count);
    if (scratch.bytes() as usize) < room {
        let message = format!("scratch has {} bytes, this step wants {room}", scratch.bytes());
        return Err(OpError { op, message });
    }
    // One segment of many tokens has no short chain, and few tokens have no other.
    if count > 1 || tokens <= SHORT {
        delta_recurrent(exec, inputs, shape, states, out, SHORT)?;
    }
    if tokens <= SHORT {
        return Ok(());
    }
    let gpu = exec.gpu()?;
    let launch = gpu.launch(op, &images::GATED_DELTA_PARTS, "gated_delta_parts")?.input(mixed).input(projected);
    let launch = launch.input(a_log).input(dt_bias).input(segments).output(scratch);
    let launch = launch.u32(tokens).u32(count).u32(key_heads).u32(value_heads).u32(SHORT).overlapped();
    // SAFETY: matches csrc/gated_delta_parts.cu; the op checked the shapes, the kernel checks the segments.
    unsafe { launch.run([DeltaShape::chunks(tokens, count), key_heads, 1], PARTS_THREADS)? };

    let Walk { name, slices, resident, threads, shared } = walk(gpu.capability());
    let launch = gpu.launch(op, &images::GATED_DELTA_WALK, name)?.input(mixed).input(scratch).input(segments);
    let launch = launch.output(states).output(out).u32(tokens).u32(states.rows_cols().0).u32(count);
    let launch = launch.u32(key_heads).u32(value_heads).shared(shared).overlapped();
    let walks = value_heads * slices * count.min(tokens / (SHORT + 1));
    // SAFETY: matches csrc/gated_delta_walk.cu; as above.
    unsafe { launch.run([walks.min(resident * gpu.multiprocessors()), 1, 1], threads) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_has_the_shared_memory() {
        // Of a block, in KiB.
        for (capability, kib) in
            [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)]
        {
            assert!(walk(capability).shared <= kib << 10, "{capability:?}");
        }
    }
}
