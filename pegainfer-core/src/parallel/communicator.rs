//! Exchanges between ranks.

use crate::exec::Exec;
use crate::record::OpRecord;
use crate::tensor::{OpError, Tensor};
use std::fmt;

/// One rank's end of the connection between all ranks. All ranks call the same operations in the same order, with
/// tensors of the same shapes. Each call is recorded as an op. On the CPU a call waits for all ranks; on a GPU it is
/// launched like any op.
pub trait Communicator: fmt::Debug + Send + Sync {
    /// Replaces `x`, bf16 or f32, by the sum over the ranks: `(x0 + x1) + x2 ...` in f32, in rank order, rounded once
    /// to the type of `x`. All ranks get the same bits.
    fn all_reduce(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError>;

    /// Concatenates the columns of all ranks: `part` is `[rows, width]` f32, `whole` is `[rows, ranks * width]` f32.
    /// Copies bits, so any four-byte words can be gathered.
    fn all_gather(&self, exec: &mut Exec, part: &Tensor, whole: &mut Tensor) -> Result<(), OpError>;

    /// Replaces this rank's rows of `x` by their sums over the ranks, added and rounded as in
    /// [`all_reduce`](Self::all_reduce). `x` is `[ranks * n, ..]` f32 or bf16; each rank in turn owns `n` rows. The
    /// other rows are undefined afterwards.
    fn reduce_scatter(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError>;

    /// Gives all ranks the rows of all, in place: `x` is `[ranks * n, ..]` f32 or bf16; each rank in turn owns `n`
    /// rows.
    fn all_gather_rows(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError>;

    /// Adds `partial` of all ranks to `residual` and normalises it in one kernel, as
    /// `pegainfer_kernels::ops::reduce_add_norm` describes, which has checked the operands. Returns false, with nothing
    /// done, if no such kernel is chosen for the size; all ranks get the same answer.
    fn reduce_add_norm(
        &self,
        exec: &mut Exec,
        partial: &mut Tensor,
        residual: &mut Tensor,
        norm: &Tensor,
        eps: f32,
        out: &mut Tensor,
    ) -> Result<bool, OpError> {
        let _ = (exec, partial, residual, norm, eps, out);
        Ok(false)
    }

    /// Error of the exchanges that have run on the device so far; read when a step is finished. The CPU reports errors
    /// at once.
    fn check(&self) -> Result<(), OpError>;

    /// Makes the current and all later exchanges of every rank fail, because this rank cannot take part any more and
    /// the others would wait for it.
    fn abort(&self);
}

/// Records an all-reduce of `x` over `ranks` ranks by `kernel`, in which this rank sends `sent` bytes.
pub fn record_all_reduce(exec: &mut Exec, kernel: &'static str, x: &Tensor, ranks: usize, sent: u64) {
    let adds = ranks.saturating_sub(1) * x.elements();
    exec.record(|_| OpRecord::new("all_reduce", kernel, &[x], &[x], adds as u64).with_sent(sent));
}

/// Records a [`reduce_add_norm`](Communicator::reduce_add_norm) of `[partial, residual, norm, out]` over `ranks` ranks
/// by `kernel`, in which this rank sends `sent` bytes.
pub fn record_reduce_add_norm(
    exec: &mut Exec,
    kernel: &'static str,
    [partial, residual, norm, out]: [&Tensor; 4],
    ranks: usize,
    sent: u64,
) {
    // An add per other rank, then the residual add and the norm.
    let flops = (ranks.saturating_sub(1) + 5) * partial.elements();
    exec.record(|_| {
        let (reads, writes) = ([partial, residual, norm], [residual, out]);
        OpRecord::new("reduce_add_norm", kernel, &reads, &writes, flops as u64).with_sent(sent)
    });
}

/// Records an all-gather over `ranks` ranks by `kernel`, in which this rank sends its part to each of the others.
pub fn record_all_gather(exec: &mut Exec, kernel: &'static str, part: &Tensor, whole: &Tensor, ranks: usize) {
    let sent = to_others(ranks, part.bytes());
    exec.record(|_| OpRecord::new("all_gather", kernel, &[part], &[whole], 0).with_sent(sent));
}

/// Records a reduce-scatter of `x` over `ranks` ranks by `kernel`, in which this rank sends its part of each other
/// rank's rows.
pub fn record_reduce_scatter(exec: &mut Exec, kernel: &'static str, x: &Tensor, ranks: usize) {
    let others = ranks.saturating_sub(1);
    let (sent, adds) = (to_others(ranks, x.bytes()) / ranks as u64, others * x.elements() / ranks);
    let read_and_written = x.bytes() + x.bytes() / ranks as u64;
    exec.record(|_| {
        let record = OpRecord::new("reduce_scatter", kernel, &[x], &[x], adds as u64);
        record.with_bytes(read_and_written).with_sent(sent)
    });
}

/// Records an [`all_gather_rows`](Communicator::all_gather_rows) of `x` over `ranks` ranks by `kernel`, in which this
/// rank sends its rows to each of the others.
pub fn record_all_gather_rows(exec: &mut Exec, kernel: &'static str, x: &Tensor, ranks: usize) {
    let sent = to_others(ranks, x.bytes()) / ranks as u64;
    exec.record(|_| OpRecord::new("all_gather_rows", kernel, &[x], &[x], 0).with_bytes(x.bytes()).with_sent(sent));
}

/// Number of rows of `x` per rank, which must be whole.
pub fn rows_of_rank(op: &'static str, x: &Tensor, ranks: usize) -> Result<usize, OpError> {
    let rows = x.rows_cols().0;
    match rows.is_multiple_of(ranks) {
        true => Ok(rows / ranks),
        false => Err(OpError { op, message: format!("{rows} rows cannot be shared equally by {ranks} ranks") }),
    }
}

/// Bytes that a rank sends if it sends `bytes` to each of the others.
pub(super) fn to_others(ranks: usize, bytes: u64) -> u64 {
    ranks.saturating_sub(1) as u64 * bytes
}

/// Name of the op in [`aborted`].
const ABORTED: &str = "communicate";

/// The error of an exchange that another rank has aborted.
pub fn aborted() -> OpError {
    OpError { op: ABORTED, message: "another rank has failed".to_owned() }
}

/// True if an error only says that another rank has failed.
pub(super) fn is_aborted(error: &OpError) -> bool {
    error.op == ABORTED
}
