//! `sparse_attention` (csrc/deepseek_v4_attention.cu).

use super::run;
use crate::cuda::abi::SparseAttention;
use crate::limits::deepseek_v4_attention::{F32_THREADS, MAX_DIM, MMA_HEADS, WARP_DIM};
use crate::ops::deepseek_v4::{Batch, Visible};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub(crate) fn sparse_attention(
    exec: &mut Exec,
    q: &Tensor,
    (kv, rings): (&Tensor, &Tensor),
    visible: Visible<'_>,
    sink: &Tensor,
    batch: &Batch<'_>,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((tokens, heads, dim), dtype) = ((q.shape()[0], q.shape()[1], q.shape()[2]), q.dtype());
    if dim > MAX_DIM {
        let message = format!("heads of {dim} elements: the GPU kernel takes {MAX_DIM}");
        return Err(OpError { op: "sparse_attention", message });
    }
    let Batch { qo_indptr, positions, slots, page_tables } = *batch;
    let (rows, pages) = page_tables.rows_cols();
    let (entries, entry_pages, per_page) =
        visible.entries().map_or((kv, 0, 0), |entries| (entries, entries.shape()[0], entries.shape()[1]));
    // Tensors that the kernel does not read have another's address.
    let (chosen, k) = match visible {
        Visible::Chosen { chosen, .. } => (chosen, chosen.rows_cols().1),
        _ => (positions, 0),
    };
    let arguments = SparseAttention {
        q,
        kv,
        rings,
        entries,
        chosen,
        sink,
        qo_indptr,
        positions,
        slots,
        page_tables,
        out,
        rows,
        pages,
        slot_count: rings.shape()[0],
        window: rings.shape()[1],
        entry_pages,
        per_page,
        k,
        heads,
        dim,
        scale: (dim as f32).sqrt().recip(),
    };
    let (heads_of_block, threads) = match dtype {
        DType::F32 => (F32_THREADS / 32, F32_THREADS),
        _ => (MMA_HEADS, 32 * dim.div_ceil(WARP_DIM)),
    };
    let kernels = [SparseAttention::sparse_attention_bf16, SparseAttention::sparse_attention_f32];
    let grid = ([tokens, heads.div_ceil(heads_of_block), 1], threads);
    run(exec, "sparse_attention", kernels, dtype, arguments, grid)
}
