//! `ops::gated_decode_attention` in one kernel: csrc/attention_decode_gated.cu.

use super::attention_decode::{Call, Scratch};
use super::images;
use crate::choice::DecodeGrid;
use crate::ops::{AttentionBatch, Heads};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// `ops::gated_decode_attention` in one kernel, for heads of 256.
pub(crate) fn gated_decode_fused(
    exec: &mut Exec,
    grid: &DecodeGrid,
    projected: &Tensor,
    heads: &Heads<'_>,
    batch: &AttentionBatch<'_>,
    (k, v): (&mut Tensor, &mut Tensor),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Heads { shape, norms, eps, rope, slots, .. } = *heads;
    let scale = (shape.head_dim as f32).sqrt().recip() * std::f32::consts::LOG2_E;
    let gpu = exec.gpu()?;
    let kernel = if grid.stages == 4 { "gated_decode_256_4" } else { "gated_decode_256_3" };
    let (call, scratch) = (Call { batch, shape, scale, grid }, Scratch::of(gpu));
    let (blocks, (positions, rotary_dim)) = (k.rows_cols().0, rope.rows_cols());
    let launch = gpu.launch("gated_decode_attention", &images::ATTENTION_DECODE_GATED, kernel)?;
    let launch = launch.early(norms.0).early(norms.1).early(rope).early(slots).early(k).early(v);
    let launch = launch.input(projected).input(norms.0).input(norms.1).input(rope).input(slots);
    let launch = launch.output(k).output(v);
    let launch = call.batch(launch, out, blocks).u32(positions).u32(rotary_dim).f32(eps);
    // SAFETY: matches csrc/attention_decode_gated.cu; the op checked the shapes, the kernel checks block ids and positions.
    unsafe { call.run(launch, scratch) }
}
