//! `route` (csrc/deepseek_v4/route.cu): one block per token.

use crate::cuda::abi::{RouteHash, RouteLearned};
use crate::limits::deepseek_v4::ROUTE_THREADS;
use crate::limits::moe::MAX_EXPERTS;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

/// Threads of a block that looks experts up, and most experts of a token: a lane has one.
const THREADS: usize = 32;

fn check_chosen(k: usize) -> Result<(), OpError> {
    if k > THREADS {
        let message = format!("{k} experts of a token: the GPU kernel takes {THREADS}");
        return Err(OpError { op: "route", message });
    }
    Ok(())
}

pub(crate) fn route_learned(
    exec: &mut Exec,
    logits: &Tensor,
    bias: &Tensor,
    scale: f32,
    (experts, weights): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let ((tokens, count), k) = (logits.rows_cols(), experts.rows_cols().1);
    if count > MAX_EXPERTS {
        let message = format!("{count} experts: the GPU kernel takes {MAX_EXPERTS}");
        return Err(OpError { op: "route", message });
    }
    check_chosen(k)?;
    if tokens == 0 {
        return Ok(());
    }
    let arguments = RouteLearned { logits, bias, experts, weights, count, k, scale };
    let launch = RouteLearned::route_learned.launch(exec.gpu()?, "route", arguments)?.early(bias).overlapped();
    // SAFETY: the op checked the shapes.
    unsafe { launch.run([tokens, 1, 1], ROUTE_THREADS) }
}

/// `table`: `[vocab, k]` u32.
pub(crate) fn route_hash(
    exec: &mut Exec,
    logits: &Tensor,
    (table, ids): (&Tensor, &Tensor),
    scale: f32,
    (experts, weights): (&mut Tensor, &mut Tensor),
) -> Result<(), OpError> {
    let ((tokens, count), (vocab, k)) = (logits.rows_cols(), table.rows_cols());
    check_chosen(k)?;
    if tokens == 0 {
        return Ok(());
    }
    let arguments = RouteHash { logits, table, ids, experts, weights, vocab, count, k, scale };
    let launch = RouteHash::route_hash.launch(exec.gpu()?, "route", arguments)?.overlapped();
    // SAFETY: the op checked the shapes; ids and experts out of range stop the kernel.
    unsafe { launch.run([tokens, 1, 1], THREADS) }
}
