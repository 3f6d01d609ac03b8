//! `select_entries` (csrc/deepseek_v4/index.cu, csrc/deepseek_v4/index_wgmma.cu): scores pass through the workspace,
//! for as many tokens at a time as fit.

use super::run;
use crate::choice::{self, DenseGemm};
use crate::cpu::deepseek_v4::batch::PAGE_TOKENS;
use crate::cuda::abi::{ChooseEntries, IndexScores, IndexScoresWgmma, Map};
use crate::limits::deepseek_v4_attention::{CHOOSE_THREADS, SCORE_THREADS, SHARE_TOKENS};
use crate::limits::deepseek_v4_index_wgmma::{DIM, HEADS, SHARED_BYTES, THREADS, TILE_ENTRIES};
use crate::ops::deepseek_v4::{RaggedBatch, SelectSpec, TokenShare};
use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

const OP: &str = "select_entries";
/// Blocks of a launch that fill every GPU; more take parts of a token's entries in turn.
const FILL: usize = 2048;
/// Maximum number of scores of a token that a block holds in its registers, 8 a thread, and 40 a thread.
const FEW_ENTRIES: usize = 8 * CHOOSE_THREADS;
const MANY_ENTRIES: usize = 40 * CHOOSE_THREADS;
/// Tokens of a tile if the rank has all tokens and such tiles give each multiprocessor [`MANY_WAVES`] blocks; otherwise
/// [`SHARE_TOKENS`].
const MANY_TOKENS: usize = 128;
const MANY_WAVES: usize = 6;

pub(crate) fn select_entries(
    exec: &mut Exec,
    (q, weights, entries): (&Tensor, &Tensor, &Tensor),
    SelectSpec { ratio, share, pages: max_pages }: SelectSpec,
    batch: &RaggedBatch<'_>,
    chosen: &mut Tensor,
) -> Result<(), OpError> {
    let (tokens, TokenShare { rank, ranks }) = (chosen.rows_cols().0, share);
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
    let ((rows, pages), k) = (page_tables.rows_cols(), chosen.rows_cols().1);
    // Largest number of scores of a token.
    let max_scores = (max_pages * PAGE_TOKENS / ratio).max(1);
    let fit = WORKSPACE_BYTES / DType::F32.size() / max_scores;
    if fit == 0 {
        let message = format!("{max_scores} entries of a sequence: the GPU kernel takes {}", WORKSPACE_BYTES / 4);
        return Err(OpError { op: OP, message });
    }
    let (scores, wgmma) = (exec.gpu()?.workspace(), takes_wgmma(exec, q)?);
    // No launch starts or ends within a tile.
    let at_once = if fit < SHARE_TOKENS { 1 << fit.ilog2() } else { fit / SHARE_TOKENS * SHARE_TOKENS };
    for first_own in (0..tokens).step_by(at_once) {
        let part = TokenRange { first_own, tokens: at_once.min(tokens - first_own), share, max_scores, scores };
        match wgmma {
            true => scores_by_wgmma(exec, (q, weights, entries), (ratio, k), batch, part)?,
            false => scores_by_warps(exec, (q, weights, entries), (ratio, k), batch, part)?,
        }
        let arguments = ChooseEntries {
            scores,
            qo_indptr,
            positions,
            slots,
            page_tables,
            chosen,
            rows,
            pages,
            ratio,
            k,
            first_own,
            rank,
            ranks,
            most: max_scores,
        };
        let kernel = if max_scores <= FEW_ENTRIES {
            ChooseEntries::choose_entries_8
        } else if max_scores <= MANY_ENTRIES {
            ChooseEntries::choose_entries_40
        } else {
            ChooseEntries::choose_entries
        };
        run(exec, OP, [kernel, kernel], q.dtype(), arguments, ([part.tokens, 1, 1], CHOOSE_THREADS))?;
    }
    Ok(())
}

/// A range of the rank's own tokens.
#[derive(Clone, Copy)]
struct TokenRange {
    /// Number of the first one among these.
    first_own: usize,
    tokens: usize,
    share: TokenShare,
    /// Largest number of scores of a token.
    max_scores: usize,
    /// Address of the scores: `[tokens, max_scores]`.
    scores: u64,
}

/// A warp has a token and some entries.
fn scores_by_warps(
    exec: &mut Exec,
    (q, weights, entries): (&Tensor, &Tensor, &Tensor),
    (ratio, k): (usize, usize),
    batch: &RaggedBatch<'_>,
    TokenRange { first_own, tokens, share: TokenShare { rank, ranks }, max_scores, scores }: TokenRange,
) -> Result<(), OpError> {
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
    let (rows, pages) = page_tables.rows_cols();
    let parts = max_scores.div_ceil(SCORE_THREADS).min(FILL.div_ceil(tokens));
    let arguments = IndexScores {
        q,
        weights,
        entries,
        qo_indptr,
        positions,
        slots,
        page_tables,
        scores,
        rows,
        pages,
        entry_pages: entries.rows_cols().0,
        ratio,
        heads: q.shape()[1],
        dim: q.shape()[2],
        k,
        first_own,
        rank,
        ranks,
        most: max_scores,
    };
    let kernels = [IndexScores::index_scores_bf16, IndexScores::index_scores_f32];
    run(exec, OP, kernels, q.dtype(), arguments, ([tokens, parts, 1], SCORE_THREADS))
}

/// True if [`scores_by_wgmma`] takes these queries.
fn takes_wgmma(exec: &mut Exec, q: &Tensor) -> Result<bool, OpError> {
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    let many = q.shape()[0] >= DenseGemm::MIN_TOKENS && q.shape()[1..] == [HEADS, DIM];
    Ok(hopper && many && q.dtype() == DType::Bf16)
}

/// A block has a tile of tokens and of entries (csrc/deepseek_v4/index_wgmma.cu).
fn scores_by_wgmma(
    exec: &mut Exec,
    (q, weights, entries): (&Tensor, &Tensor, &Tensor),
    (ratio, k): (usize, usize),
    batch: &RaggedBatch<'_>,
    TokenRange { first_own, tokens, share: TokenShare { rank, ranks }, max_scores, scores }: TokenRange,
) -> Result<(), OpError> {
    let RaggedBatch { qo_indptr, positions, slots, page_tables } = *batch;
    let ((rows, pages), gpu) = (page_tables.rows_cols(), exec.gpu()?);
    let entry_tiles = max_scores.div_ceil(TILE_ENTRIES);
    // A block loads its entries once for all of its tokens; small tiles keep all multiprocessors busy.
    let waves = tokens.div_ceil(MANY_TOKENS) * entry_tiles / gpu.multiprocessors();
    let tile = if ranks == 1 && waves >= MANY_WAVES { MANY_TOKENS } else { SHARE_TOKENS };
    let arguments = IndexScoresWgmma {
        q: Map::heads(OP, q, HEADS)?,
        weights,
        entries,
        qo_indptr,
        positions,
        slots,
        page_tables,
        scores,
        rows,
        pages,
        entry_pages: entries.rows_cols().0,
        ratio,
        k,
        first_own,
        rank,
        ranks,
        tokens,
        tile,
        most: max_scores,
    };
    let grid = [entry_tiles, tokens.div_ceil(tile), 1];
    let launch = IndexScoresWgmma::index_scores_wgmma.launch(gpu, OP, arguments)?.overlapped();
    // SAFETY: the op checked the shapes, `takes_wgmma` those of a query; the grid covers all entries and tokens.
    unsafe { launch.shared(SHARED_BYTES).run(grid, THREADS) }
}
