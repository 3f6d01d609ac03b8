//! `ops::gated_decode_attention` in one kernel: csrc/gated_decode.cu.

use super::attention_decode::{COLUMNS, Call, Resources, available, stages};
use super::images;
use crate::ops::{AttentionBatch, HeadShape, Heads};
use pegainfer_core::cuda::Cuda;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// The head size that the kernel is built for.
const HEAD_DIM: usize = 256;

/// Whether [`gated_decode_fused`] takes this shape.
pub(crate) fn gated_fused(gpu: &Cuda, shape: HeadShape) -> bool {
    available(gpu, shape) && shape.head_dim == HEAD_DIM && shape.group() <= COLUMNS
}

/// `ops::gated_decode_attention` for shapes that [`gated_fused`] accepts.
pub(crate) fn gated_decode_fused(
    exec: &mut Exec,
    projected: &Tensor,
    heads: &Heads<'_>,
    batch: &AttentionBatch<'_>,
    (k, v): (&mut Tensor, &mut Tensor),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Heads { shape, norms, eps, rope, slots, .. } = *heads;
    let scale = (shape.head_dim as f32).sqrt().recip() * std::f32::consts::LOG2_E;
    let gpu = exec.gpu()?;
    let pairs = batch.block_tables.rows_cols().0 * shape.kv_heads;
    let stages = stages(gpu.multiprocessors(), pairs, shape.head_dim);
    let kernel = if stages == 4 { "gated_decode_256_4" } else { "gated_decode_256_3" };
    let (call, resources) = (Call { batch, shape, scale, n: 1, stages }, Resources::of(gpu));
    let (blocks, (positions, rotary_dim)) = (k.rows_cols().0, rope.rows_cols());
    let launch = gpu.launch("gated_decode_attention", &images::GATED_DECODE, kernel)?;
    let launch = launch.input(projected).input(norms.0).input(norms.1).input(rope).input(slots);
    let launch = launch.output(k).output(v);
    let launch = call.batch(launch, out, blocks).u32(positions).u32(rotary_dim).f32(eps);
    // SAFETY: matches csrc/gated_decode.cu; the op checked the shapes, the kernel checks block ids and positions.
    unsafe { call.run(launch, resources) }
}
