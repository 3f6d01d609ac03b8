//! Launch of csrc/linear_qkv.cu: the QKV projection of many rows with norms, rotation and cache on Hopper's warpgroups.

use super::linear::{linear, linear_kernel};
use super::many::{BOX_ROWS, ELEMENT, GROUP, MAX_SHARED, ROWS, SHARED, THREADS, takes};
use super::qkv::qk_norm_rope_write_kv;
use super::{images, pieces};
use crate::heads::BLOCK_SIZE;
use crate::ops::{HeadShape, Heads};
use pegainfer_core::cuda::{Cuda, TensorMap};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rows of x from which the kernel is faster than cuBLASLt and csrc/qkv.cu; see docs/benchmarks/h200-kernels.md.
const MIN_ROWS: usize = 1024;

/// As in csrc/linear_qkv.cu.
const HEAD_DIM: usize = 128;
const PARTS: usize = 12;
/// Bytes of `SharedHeads`: the two norms, too.
const HEADS_SHARED: usize = SHARED + 2 * HEAD_DIM * ELEMENT;
const _: () = assert!(HEADS_SHARED <= MAX_SHARED);

/// Whether `gpu` runs this kernel for `m` rows of `k` columns.
fn is_fused(gpu: &Cuda, m: usize, k: usize, shape: HeadShape) -> bool {
    m >= MIN_ROWS && shape.head_dim == HEAD_DIM && takes(gpu, k, PARTS)
}

/// Name of the kernel that takes `m` rows of `k` columns, for the record.
pub(crate) fn qkv_kernel(gpu: &mut Cuda, m: usize, k: usize, shape: HeadShape) -> &'static str {
    if is_fused(gpu, m, k, shape) { "qkv" } else { linear_kernel(gpu, m, shape.qkv_width(), DType::Bf16) }
}

pub(crate) fn linear_qkv(
    exec: &mut Exec,
    (x, w): (&Tensor, &Tensor),
    heads: &Heads<'_>,
    qkv: &mut Tensor,
    q: &mut Tensor,
    (k, v): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let (op, (m, columns)) = ("linear_qkv", x.rows_cols());
    let Heads { shape, norms, eps, rope, positions, slots } = *heads;
    pieces(op, columns)?;
    let gpu = exec.gpu()?;
    if !is_fused(gpu, m, columns, shape) {
        linear(exec, x, w, qkv)?;
        return qk_norm_rope_write_kv(exec, qkv, heads, q, (k, v));
    }
    let grid = [gpu.multiprocessors(), 1, 1];
    let (max_position, max_slot) = (rope.rows_cols().0, k.rows_cols().0 * BLOCK_SIZE);
    let (x, w) = (TensorMap::new(op, x, ROWS)?, TensorMap::new(op, w, BOX_ROWS)?);
    let launch = gpu.launch(op, &images::LINEAR_QKV, "linear_qkv_many")?.map(x).map(w);
    let launch = launch.input(norms.0).input(norms.1).input(rope).input(positions).input(slots);
    let launch = launch.output(q).output(k).output(v);
    let launch = launch.u32(m).u32(columns).u32(shape.heads).u32(shape.kv_heads).u32(max_position).u32(max_slot);
    let launch = launch.f32(eps).u32(GROUP).shared(HEADS_SHARED).overlapped();
    // SAFETY: matches csrc/linear_qkv.cu; the op checked the shapes, the kernel checks positions and slots.
    unsafe { launch.run(grid, THREADS) }
}
