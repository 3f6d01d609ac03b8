//! `select_entries` (csrc/deepseek_v4_index.cu): scores through the workspace, of as many tokens at a time as fit there.

use super::run;
use crate::cpu::deepseek_v4::batch::PAGE_TOKENS;
use crate::cuda::abi::{ChooseEntries, IndexScores};
use crate::limits::deepseek_v4_attention::{CHOOSE_THREADS, SCORE_THREADS};
use crate::ops::deepseek_v4::Batch;
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Blocks of a launch that fill every GPU; more take parts of a token's entries in turn.
const FILL: usize = 2048;

pub(crate) fn select_entries(
    exec: &mut Exec,
    (q, weights, entries): (&Tensor, &Tensor, &Tensor),
    ratio: usize,
    batch: &Batch<'_>,
    chosen: &mut Tensor,
) -> Result<(), OpError> {
    let (tokens, heads, dim) = (q.shape()[0], q.shape()[1], q.shape()[2]);
    let Batch { qo_indptr, positions, slots, page_tables } = *batch;
    let ((rows, pages), k) = (page_tables.rows_cols(), chosen.rows_cols().1);
    // Scores of a token.
    let most = (pages * PAGE_TOKENS / ratio).max(1);
    let tile = WORKSPACE_BYTES / DType::F32.size() / most;
    if tile == 0 {
        let message = format!("{most} entries of a sequence: the GPU kernel takes {}", WORKSPACE_BYTES / 4);
        return Err(OpError { op: "select_entries", message });
    }
    let workspace = exec.gpu()?.workspace();
    for first_token in (0..tokens).step_by(tile) {
        let count = tile.min(tokens - first_token);
        let parts = most.div_ceil(SCORE_THREADS).min(FILL.div_ceil(count));
        let arguments = IndexScores {
            q,
            weights,
            entries,
            qo_indptr,
            positions,
            slots,
            page_tables,
            scores: workspace,
            rows,
            pages,
            entry_pages: entries.rows_cols().0,
            ratio,
            heads,
            dim,
            k,
            first_token,
            most,
        };
        let kernels = [IndexScores::index_scores_bf16, IndexScores::index_scores_f32];
        run(exec, "select_entries", kernels, q.dtype(), arguments, ([count, parts, 1], SCORE_THREADS))?;
        let arguments = ChooseEntries {
            scores: workspace,
            qo_indptr,
            positions,
            slots,
            page_tables,
            chosen,
            rows,
            pages,
            ratio,
            k,
            first_token,
            most,
        };
        let kernel = ChooseEntries::choose_entries;
        run(exec, "select_entries", [kernel, kernel], q.dtype(), arguments, ([count, 1, 1], CHOOSE_THREADS))?;
    }
    Ok(())
}
