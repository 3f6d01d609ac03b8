//! Attention of images with rotary positions of two dimensions.

use super::operands::is_values;
use super::{rotate_grid, segment_attention};
use crate::choice;
use crate::cuda;
use crate::heads::BLOCK_SIZE;
use crate::ops::check::Check;
use crate::patches::{Grid, wide_head};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// [`rotate_grid`](super::rotate_grid()), then [`segment_attention`](super::segment_attention()).
///
/// `qkv`: `[n, 3, heads, head_dim]` bf16 or f32; `out`: `[n, heads * head_dim]` of the same type; `blocks`: those that
/// `grid.slots` are in; `scratch`: memory of any type. What `qkv` and `scratch` hold then depends on the device. With at
/// least [`scratch_bytes`] bytes Hopper runs one kernel that rotates and packs keys and values, and one by wgmma, for
/// heads of 64 to 128.
///
/// # Errors
/// Wrong shapes or dtypes; those of the two ops.
pub fn grid_attention(
    exec: &mut Exec,
    qkv: &mut Tensor,
    (grid, blocks): (&Grid<'_>, usize),
    scale: f32,
    scratch: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let Grid { table, positions, slots, segments } = *grid;
    let [n, heads, head_dim] = [0, 2, 3].map(|i| qkv.shape().get(i).copied().unwrap_or(0));
    let fits = scratch.bytes() >= scratch_bytes((n, blocks), (heads, head_dim)) as u64;
    if !choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper() && wide_head(head_dim).is_some() && fits) {
        rotate_grid(exec, table, positions, qkv)?;
        return segment_attention(exec, qkv, segments, scale, out);
    }
    let (check, half) = (Check("grid_attention"), head_dim / 2);
    is_values(check, qkv, &[n, 3, heads, head_dim])?;
    check.is(table, DType::F32, &[table.rows_cols().0, half])?;
    check.is(positions, DType::U32, &[n, 2])?;
    check.is(slots, DType::U32, &[n])?;
    check.is(segments.indptr, DType::U32, &[segments.indptr.elements()])?;
    check.is(out, qkv.dtype(), &[n, heads * head_dim])?;
    check
        .that(scratch.bytes() >= scratch_bytes((n, blocks), (heads, head_dim)) as u64, "there is too little scratch")?;
    exec.record(|_| {
        let flops = 4 * segments.scores * (heads * head_dim) as u64;
        OpRecord::new(check.0, "wgmma", &[qkv, table, positions, slots, segments.indptr], &[out, qkv], flops)
    });
    if exec.device() == Device::Cuda {
        cuda::vision::grid_attention(exec, qkv, (grid, blocks), scale, scratch.device(), out)?;
    }
    Ok(())
}

/// Bytes of scratch for `n` patches in so many blocks: queries, keys and values of wide heads.
pub fn scratch_bytes((n, blocks): (usize, usize), (heads, head_dim): (usize, usize)) -> usize {
    let wide = wide_head(head_dim).unwrap_or(0);
    (n + 2 * blocks * BLOCK_SIZE) * heads * wide * DType::Bf16.size()
}
